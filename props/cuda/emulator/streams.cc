// Streams and events. Work that is put on a stream waits there until the host
// waits for it.

#include <algorithm>
#include <utility>

#include "props/cuda/emulator/internal.h"

namespace kvtwin::emulator {

cudaStream_t Streams::Find(cudaStream_t name) {
  if (all_.empty()) Create(/*blocking=*/true);  // Stream 0.
  if (name == nullptr || name == cudaStreamLegacy) return all_[0].get();
  for (const auto& stream : all_) {
    if (stream.get() == name && !stream->destroyed) return name;
  }
  return nullptr;
}

cudaStream_t Streams::Create(bool blocking) {
  all_.push_back(std::make_unique<CUstream_st>());
  all_.back()->blocking = blocking;
  return all_.back().get();
}

void Streams::Destroy(cudaStream_t stream) {
  stream->destroyed = true;
  if (!stream->queue.empty()) return;  // It is erased when its queue is empty.
  std::erase_if(all_, [&](const auto& it) { return it.get() == stream; });
}

void Streams::SetSeed(std::uint64_t seed) {
  random_.Seed(seed);
  lazy_ = seed == 0;
}

cudaError_t Streams::Put(cudaStream_t stream, Work work) {
  if (stream->capture != nullptr) {
    Capture& capture = *stream->capture;
    if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
    capture.nodes.push_back({std::move(work), std::move(stream->last)});
    stream->last = {capture.nodes.size() - 1};
    return cudaSuccess;
  }
  if (stream == all_[0].get()) {
    // It would wait for a stream that is captured, and so does not run.
    for (const cudaStream_t other : Capturing()) {
      if (!other->blocking) continue;
      other->capture->invalid = true;
      return cudaErrorStreamCaptureImplicit;
    }
  }
  PutStep(stream,
          [work = std::move(work)] {
            work();
            return true;
          },
          {});
  return cudaSuccess;
}

MarkPointer Streams::PutStep(cudaStream_t stream, std::function<bool()> step,
                             std::vector<MarkPointer> waits) {
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  stream->queue.push_back(
      {next_number_++, std::move(step), std::move(waits), mark});
  DoEarly();
  return mark;
}

// Unless lazy, now and then runs some steps that could also wait.
void Streams::DoEarly() {
  if (lazy_ || random_.Below(16) != 0) return;
  for (std::size_t i = random_.Below(8); i > 0; --i) {
    const cudaStream_t some = all_[random_.Below(all_.size())].get();
    if (!some->queue.empty()) StepOnce(some);
  }
}

void Streams::StepFor(const Mark& mark) { Step(mark.stream); }

void Streams::Step(cudaStream_t stream) {
  if (!lazy_ && random_.Below(2) == 0) {
    const cudaStream_t some = all_[random_.Below(all_.size())].get();
    if (!some->queue.empty()) {
      // This may erase `some`, which may be `stream`: so return.
      StepOnce(some);
      return;
    }
  }
  StepOnce(stream);
}

// Runs the next step of the stream, or of a stream that it waits for: that step
// was put earlier, so the recursion ends.
void Streams::StepOnce(cudaStream_t stream) {
  Operation& next = stream->queue.front();
  for (const MarkPointer& mark : next.waits) {
    if (!mark->done) return StepOnce(mark->stream);
  }
  // Stream 0 waits for the blocking streams, and they wait for stream 0.
  if (stream->blocking) {
    for (const auto& other : all_) {
      const bool legacy = stream == all_[0].get() || other == all_[0];
      if (legacy && other->blocking && other.get() != stream &&
          !other->queue.empty() && other->queue.front().number < next.number) {
        return StepOnce(other.get());
      }
    }
  }
  memory_.Open();
  const bool done = next.step();
  memory_.Close();
  if (!done) return;
  next.mark->time = std::chrono::steady_clock::now();
  next.mark->done = true;
  stream->queue.pop_front();
  if (stream->destroyed) Destroy(stream);
}

void Streams::Finish(cudaStream_t stream) {
  memory_.Open();
  while (!stream->queue.empty()) Step(stream);
  memory_.Close();
}

void Streams::FinishAll() {
  memory_.Open();
  for (;;) {
    std::vector<cudaStream_t> busy;
    for (const auto& stream : all_) {
      if (!stream->queue.empty()) busy.push_back(stream.get());
    }
    if (busy.empty()) break;
    StepOnce(busy[random_.Below(busy.size())]);
  }
  memory_.Close();
}

std::vector<cudaStream_t> Streams::Capturing() const {
  std::vector<cudaStream_t> out;
  for (const auto& stream : all_) {
    if (stream->capture != nullptr) out.push_back(stream.get());
  }
  return out;
}

}  // namespace kvtwin::emulator

using kvtwin::emulator::Call;
using kvtwin::emulator::CapturePointer;
using kvtwin::emulator::Device;
using kvtwin::emulator::Do;
using kvtwin::emulator::MarkPointer;

namespace {

// For calls on a stream or an event that are not allowed during capture.
cudaError_t Invalidate(kvtwin::emulator::Capture& capture, cudaError_t error) {
  capture.invalid = true;
  return error;
}

CUevent_st* FindEvent(Device& device, cudaEvent_t event) {
  return device.events.contains(event) ? event : nullptr;
}

bool Done(const MarkPointer& mark) { return mark == nullptr || mark->done; }

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                         int /*priority*/) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return Do(Call::kStream, [&](Device& device) {
    if (stream == nullptr || flags > 1) return cudaErrorInvalidValue;
    device.streams.Find(nullptr);  // Stream 0 must come first.
    *stream = device.streams.Create(flags != cudaStreamNonBlocking);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return Do(Call::kStream, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (stream == nullptr || found == nullptr || found != stream) {
      return cudaErrorInvalidResourceHandle;
    }
    if (found->capture != nullptr) {
      const CapturePointer capture = found->capture;
      capture->invalid = true;
      const bool over = capture->origin == found;
      if (over) capture->origin = nullptr;
      for (const cudaStream_t other : device.streams.Capturing()) {
        if (other == found || (over && other->capture == capture)) {
          other->capture.reset();
        }
      }
    }
    device.streams.Destroy(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return Do(Call::kSynchronize, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) {
      return Invalidate(*found->capture, cudaErrorStreamCaptureUnsupported);
    }
    device.streams.Finish(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Do(Call::kQuery, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) {
      return Invalidate(*found->capture, cudaErrorStreamCaptureUnsupported);
    }
    if (device.streams.Idle(found)) return cudaSuccess;
    device.streams.Step(found);  // So that polling ends.
    return cudaErrorNotReady;
  });
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  return Do(Call::kQuery, [&](Device& it) {
    if (it.streams.Find(stream) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (device == nullptr) return cudaErrorInvalidValue;
    *device = 0;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return Do(Call::kQuery, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (flags == nullptr) return cudaErrorInvalidValue;
    *flags = found->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
    return cudaSuccess;
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                               void* user_data) {
  return Do(Call::kStream, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (function == nullptr) return cudaErrorInvalidValue;
    return device.streams.Put(found,
                              [function, user_data] { function(user_data); });
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return Do(Call::kEvent, [&](Device& device) {
    if (event == nullptr || flags > 3) return cudaErrorInvalidValue;
    *event = new CUevent_st;
    (*event)->timing = (flags & cudaEventDisableTiming) == 0;
    device.events.insert(*event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return Do(Call::kEvent, [&](Device& device) {
    if (FindEvent(device, event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    device.events.erase(event);
    delete event;
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return Do(Call::kEvent, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr || FindEvent(device, event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    event->capture = found->capture;
    if (found->capture != nullptr) {
      if (found->capture->invalid) return cudaErrorStreamCaptureInvalidated;
      event->mark.reset();
      event->last = found->last;
      return cudaSuccess;
    }
    event->mark = device.streams.PutStep(found, [] { return true; }, {});
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags) {
  return Do(Call::kStream, [&](Device& device) {
    const cudaStream_t found = device.streams.Find(stream);
    if (found == nullptr || FindEvent(device, event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (flags != 0) return cudaErrorInvalidValue;
    if (event->capture == nullptr) {
      if (found->capture != nullptr) {
        return Invalidate(*found->capture, cudaErrorStreamCaptureIsolation);
      }
      if (!Done(event->mark)) {
        device.streams.PutStep(found, [] { return true; }, {event->mark});
      }
      return cudaSuccess;
    }
    if (event->capture->origin == nullptr) return cudaErrorCapturedEvent;
    if (found->capture == nullptr) {
      if (found == device.streams.Find(nullptr)) {
        return Invalidate(*event->capture, cudaErrorStreamCaptureImplicit);
      }
      found->capture = event->capture;  // The stream joins the capture.
      found->last.clear();
    } else if (found->capture != event->capture) {
      event->capture->invalid = true;
      return Invalidate(*found->capture, cudaErrorStreamCaptureMerge);
    }
    if (found->capture->invalid) return cudaErrorStreamCaptureInvalidated;
    for (const std::size_t node : event->last) {
      if (std::ranges::find(found->last, node) == found->last.end()) {
        found->last.push_back(node);
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Do(Call::kQuery, [&](Device& device) {
    if (FindEvent(device, event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (event->capture != nullptr) return cudaErrorCapturedEvent;
    if (Done(event->mark)) return cudaSuccess;
    device.streams.StepFor(*event->mark);
    return cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return Do(Call::kSynchronize, [&](Device& device) {
    if (FindEvent(device, event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (event->capture != nullptr) {
      return Invalidate(*event->capture, cudaErrorCapturedEvent);
    }
    while (!Done(event->mark)) device.streams.StepFor(*event->mark);
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                 cudaEvent_t end) {
  return Do(Call::kEvent, [&](Device& device) {
    if (milliseconds == nullptr) return cudaErrorInvalidValue;
    for (const cudaEvent_t event : {start, end}) {
      if (FindEvent(device, event) == nullptr || !event->timing ||
          event->mark == nullptr) {
        return cudaErrorInvalidResourceHandle;
      }
      if (!event->mark->done) return cudaErrorNotReady;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time -
                                                             start->mark->time)
                        .count();
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return Do(Call::kSynchronize, [&](Device& device) {
    for (const cudaStream_t stream : device.streams.Capturing()) {
      return Invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
    }
    device.streams.FinishAll();
    return cudaSuccess;
  });
}
