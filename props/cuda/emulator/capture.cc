// Graphs, and how streams capture them.

#include <algorithm>
#include <utility>

#include "props/cuda/emulator/internal.h"

namespace kvtwin::emulator {
namespace {

// How potentially unsafe calls of this thread affect captures.
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// These nodes and all nodes that come before them, directly or not.
std::vector<bool> Reached(const Capture& capture,
                          const std::vector<std::size_t>& nodes) {
  std::vector<bool> out(capture.nodes.size());
  for (const std::size_t node : nodes) out[node] = true;
  // A node comes only after nodes with smaller numbers.
  for (std::size_t i = out.size(); i-- > 0;) {
    if (!out[i]) continue;
    for (const std::size_t before : capture.nodes[i].after) out[before] = true;
  }
  return out;
}

// Runs the nodes of a graph, one at a time, in a random order.
class GraphRun {
 public:
  GraphRun(std::shared_ptr<const std::vector<Node>> nodes, Random& random)
      : nodes_(std::move(nodes)), random_(random), done_(nodes_->size()) {}

  bool operator()() {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < nodes_->size(); ++i) {
      const std::vector<std::size_t>& after = (*nodes_)[i].after;
      if (!done_[i] &&
          std::ranges::all_of(after, [&](std::size_t n) { return done_[n]; })) {
        ready.push_back(i);
      }
    }
    if (ready.empty()) return true;
    const std::size_t node = ready[random_.Below(ready.size())];
    (*nodes_)[node].work();
    done_[node] = true;
    return ++count_ == nodes_->size();
  }

 private:
  std::shared_ptr<const std::vector<Node>> nodes_;
  Random& random_;
  std::vector<bool> done_;
  std::size_t count_ = 0;
};

}  // namespace

cudaError_t RefuseInCapture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const cudaStream_t stream : TheDevice().streams.Capturing()) {
    Capture& capture = *stream->capture;
    const bool own = capture.thread == std::this_thread::get_id();
    if (capture.mode == cudaStreamCaptureModeRelaxed) continue;
    if (!own && (capture.mode == cudaStreamCaptureModeThreadLocal ||
                 thread_mode == cudaStreamCaptureModeThreadLocal)) {
      continue;
    }
    capture.invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

}  // namespace kvtwin::emulator

using kvtwin::emulator::Call;
using kvtwin::emulator::Capture;
using kvtwin::emulator::CapturePointer;
using kvtwin::emulator::Device;
using kvtwin::emulator::Do;
using kvtwin::emulator::MarkPointer;
using kvtwin::emulator::Node;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return Do(Call::kGraph, [&](Device&) {
    if (mode == nullptr) return cudaErrorInvalidValue;
    std::swap(*mode, kvtwin::emulator::thread_mode);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream,
                                   cudaStreamCaptureMode mode) {
  return Do(Call::kGraph, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found == device.streams.Find(nullptr)) {
      return cudaErrorStreamCaptureUnsupported;
    }
    if (found->capture != nullptr) return cudaErrorIllegalState;
    found->capture = std::make_shared<Capture>();
    found->capture->origin = found;
    found->capture->mode = mode;
    found->capture->thread = std::this_thread::get_id();
    found->last.clear();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return Do(Call::kGraph, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph == nullptr) return cudaErrorInvalidValue;
    if (found->capture == nullptr) return cudaErrorIllegalState;
    const CapturePointer capture = found->capture;
    if (capture->origin != found) {
      capture->invalid = true;
      return cudaErrorStreamCaptureUnmatched;
    }
    if (capture->mode != cudaStreamCaptureModeRelaxed &&
        capture->thread != std::this_thread::get_id()) {
      return cudaErrorStreamCaptureWrongThread;
    }
    const std::vector<bool> reached =
        kvtwin::emulator::Reached(*capture, found->last);
    const bool joined = std::ranges::find(reached, false) == reached.end();
    for (const cudaStream_t other : device.streams.Capturing()) {
      if (other->capture == capture) other->capture.reset();
    }
    capture->origin = nullptr;  // The capture has ended.
    *graph = nullptr;
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st;
    (*graph)->nodes =
        std::make_shared<std::vector<Node>>(std::move(capture->nodes));
    device.graphs.insert(*graph);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus* status) {
  return Do(Call::kQuery, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (status == nullptr) return cudaErrorInvalidValue;
    *status = found->capture == nullptr ? cudaStreamCaptureStatusNone
              : found->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  return Do(Call::kGraph, [&](Device& device) {
    if (exec == nullptr || !device.graphs.contains(graph)) {
      return cudaErrorInvalidValue;
    }
    *exec = new CUgraphExec_st;
    (*exec)->nodes = graph->nodes;
    device.execs.insert(*exec);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t /*stream*/) {
  return Do(Call::kGraph, [&](Device& device) {
    return device.execs.contains(exec) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return Do(Call::kGraph, [&](Device& device) {
    if (!device.execs.contains(exec)) return cudaErrorInvalidValue;
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) {
      found->capture->invalid = true;
      return cudaErrorNotSupported;
    }
    std::vector<MarkPointer> waits;
    // Two runs of one graph execute one after the other.
    if (exec->mark != nullptr) waits.push_back(exec->mark);
    exec->mark = device.streams.PutStep(
        found, kvtwin::emulator::GraphRun(exec->nodes, device.streams.random()),
        std::move(waits));
    return cudaSuccess;
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return Do(Call::kGraph, [&](Device& device) {
    if (device.graphs.erase(graph) == 0) return cudaErrorInvalidValue;
    delete graph;
    return cudaSuccess;
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return Do(Call::kGraph, [&](Device& device) {
    if (device.execs.erase(exec) == 0) return cudaErrorInvalidValue;
    delete exec;
    return cudaSuccess;
  });
}
