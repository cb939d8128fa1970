// An HTTP server of a model, which speaks the protocol of OpenAI.

#include <httplib.h>
#include <pthread.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "engine.h"

namespace {

using namespace serve;
using httplib::Request, httplib::Response;
using Json = nlohmann::json;

struct Options {
  std::string model, host = "127.0.0.1", park;
  int port = 8080;
  std::size_t parked = 64;
  std::string weights = "bf16", rows = "f16";
  EngineOptions engine;
};

// An error of a request. It is answered in OpenAI's shape.
struct BadRequest {
  std::string message, parameter = {};
  int status = 400;
  std::string code = {};
};

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Returns a field, or `usual` if it is absent or null.
template <class T>
T Field(const Json& body, const char* name, T usual) try {
  const auto found = body.find(name);
  return found == body.end() || found->is_null() ? usual : found->get<T>();
} catch (const Json::exception&) {
  throw BadRequest{std::string("'") + name + "' has a wrong type", name};
}

double Range(const Json& body, const char* name, double usual, double min,
             double max) {
  const double value = Field(body, name, usual);
  if (value >= min && value <= max) return value;
  throw BadRequest{std::string("'") + name + "' is not from " +
                       std::to_string(min) + " to " + std::to_string(max),
                   name};
}

// Options that this server does not have may be given with the value that means
// that they are not used.
void RefuseOthers(const Json& body) {
  static const Json kUnused = {{"n", 1},
                               {"best_of", 1},
                               {"echo", false},
                               {"suffix", ""},
                               {"presence_penalty", 0},
                               {"frequency_penalty", 0},
                               {"tools", Json::array()},
                               {"logit_bias", Json::object()},
                               {"response_format", {{"type", "text"}}}};
  for (const auto& [name, value] : kUnused.items()) {
    const auto found = body.find(name);
    if (found != body.end() && !found->is_null() && *found != value) {
      throw BadRequest{"'" + name + "' is not supported", name};
    }
  }
  const Json logprobs = body.value("logprobs", Json());
  if (!logprobs.is_null() && logprobs != false) {
    throw BadRequest{"'logprobs' is not supported", "logprobs"};
  }
}

Sampling ReadSampling(const Json& body, int usual_max, int room) {
  RefuseOthers(body);
  Sampling sampling;
  const char* limit = body.contains("max_completion_tokens")
                          ? "max_completion_tokens"
                          : "max_tokens";
  sampling.max_tokens =
      std::min(room, static_cast<int>(Range(body, limit, usual_max, 1, 1e9)));
  sampling.temperature = Range(body, "temperature", 1, 0, 2);
  sampling.top_p = Range(body, "top_p", 1, 0, 1);
  sampling.seed = Field<std::uint64_t>(body, "seed", std::random_device()());
  const Json stop = Field(body, "stop", Json());
  if (stop.is_string()) {
    sampling.stop = {Field<std::string>(body, "stop", "")};
  } else {
    sampling.stop = Field(body, "stop", sampling.stop);
  }
  std::erase(sampling.stop, "");
  if (sampling.stop.size() > 4) {
    throw BadRequest{"'stop' has more than 4 strings", "stop"};
  }
  return sampling;
}

class Server {
 public:
  Server(const Options& options, Model& model, const Tokenizer& tokenizer,
         Engine& engine)
      : options_(options),
        name_(std::filesystem::path(options.model).filename().string()),
        model_(model),
        tokenizer_(tokenizer),
        engine_(engine) {
    http_.new_task_queue = [] { return new httplib::ThreadPool(128); };
    http_.set_payload_max_length(std::size_t{16} << 20);
    http_.set_tcp_nodelay(true);
    const auto post = [this](bool chat) {
      return [this, chat](const Request& request, Response& response) {
        Complete(request, response, chat);
      };
    };
    http_.Post("/v1/completions", post(false));
    http_.Post("/v1/chat/completions", post(true));
    http_.Get("/v1/models", [this](const Request&, Response& response) {
      const Json model = {{"id", name_},
                          {"object", "model"},
                          {"created", 0},
                          {"owned_by", "kvtwin"}};
      response.set_content(Dump({{"object", "list"}, {"data", {model}}}),
                           "application/json");
    });
    http_.Get("/health", [](const Request&, Response& response) {
      response.set_content("{\"status\":\"ok\"}", "application/json");
    });
    http_.Get("/metrics", [this](const Request&, Response& response) {
      response.set_content(Metrics(), "text/plain; version=0.0.4");
    });
    http_.set_error_handler([](const Request&, Response& response) {
      if (response.body.empty()) {
        Fail(response, {"no such page", "", response.status, ""});
      }
    });
  }

  // Serves until a signal comes. Returns false if the port is taken.
  bool Run(const sigset_t& signals) {
    const int port = options_.port == 0
                         ? http_.bind_to_any_port(options_.host.c_str())
                         : options_.port;
    if (port < 0 || (options_.port != 0 &&
                     !http_.bind_to_port(options_.host.c_str(), port))) {
      return false;
    }
    std::cout << "http://" << options_.host << ":" << port << std::endl;
    std::thread([this, signals] {
      int signal = 0;
      sigwait(&signals, &signal);
      http_.stop();
    }).detach();
    return http_.listen_after_bind();
  }

 private:
  static void Fail(Response& response, const BadRequest& bad) {
    response.status = bad.status;
    const auto text = [](const std::string& value) {
      return value.empty() ? Json() : Json(value);
    };
    const Json error = {
        {"message", bad.message},
        {"type", bad.status < 500 ? "invalid_request_error" : "server_error"},
        {"param", text(bad.parameter)},
        {"code", text(bad.code)}};
    response.set_content(Dump({{"error", error}}), "application/json");
  }

  // The template of SmolLM2, as in its tokenizer_config.json. Special tokens in
  // the messages are text.
  Tokens ChatPrompt(const Json& body) const {
    Tokens tokens;
    const auto add = [&](const std::string& role, const std::string& text) {
      tokens.push_back(tokenizer_.Special("<|im_start|>"));
      for (const auto token : tokenizer_.Encode(role + "\n" + text, false)) {
        tokens.push_back(token);
      }
    };
    const auto end = [&] {
      tokens.push_back(tokenizer_.Special("<|im_end|>"));
      for (const auto token : tokenizer_.Encode("\n", false)) {
        tokens.push_back(token);
      }
    };
    const Json messages = Field(body, "messages", Json());
    if (!messages.is_array() || messages.empty()) {
      throw BadRequest{"'messages' is not a list of messages", "messages"};
    }
    for (const Json& message : messages) {
      const auto role = Field<std::string>(message, "role", "");
      if (role != "system" && role != "user" && role != "assistant") {
        throw BadRequest{"a message has the role '" + role + "'", "messages"};
      }
      if (tokens.empty() && role != "system") {
        add("system",
            "You are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face");
        end();
      }
      std::string text;
      const Json content = Field(message, "content", Json(""));
      for (const Json& part : content.is_array() ? content : Json::array()) {
        text += Field<std::string>(part, "text", "");
      }
      add(role, content.is_array()
                    ? text
                    : Field<std::string>(message, "content", ""));
      end();
    }
    add("assistant", "");
    return tokens;
  }

  Tokens Prompt(const Json& body) const {
    Json prompt = Field(body, "prompt", Json(""));
    if (prompt.is_array() && prompt.size() == 1 && !prompt[0].is_number()) {
      prompt = Json(prompt[0]);
    }
    const Json field = {{"prompt", prompt}};
    if (!prompt.is_array()) {
      return tokenizer_.Encode(Field<std::string>(field, "prompt", ""), true);
    }
    const Tokens tokens = Field(field, "prompt", Tokens());
    for (const std::int32_t token : tokens) {
      if (token < 0 || token >= model_.config().vocab) {
        throw BadRequest{"'prompt' has the token " + std::to_string(token),
                         "prompt"};
      }
    }
    return tokens;
  }

  void Complete(const Request& request, Response& response, bool chat) try {
    const Json body = Json::parse(request.body, nullptr, false);
    if (!body.is_object())
      throw BadRequest{"the body is not a JSON object", ""};
    const std::string model = Field<std::string>(body, "model", name_);
    if (model != name_) {
      throw BadRequest{"the model '" + model + "' does not exist", "model", 404,
                       "model_not_found"};
    }
    Tokens prompt = chat ? ChatPrompt(body) : Prompt(body);
    const int room = options_.engine.context - static_cast<int>(prompt.size());
    if (prompt.empty()) throw BadRequest{"the prompt is empty", "prompt"};
    if (room < 1) {
      throw BadRequest{"the prompt has " + std::to_string(prompt.size()) +
                           " tokens; the context is " +
                           std::to_string(options_.engine.context),
                       chat ? "messages" : "prompt", 400,
                       "context_length_exceeded"};
    }
    const Sampling sampling = ReadSampling(body, chat ? room : 16, room);
    const bool stream = Field(body, "stream", false);
    const bool usage = Field(Field(body, "stream_options", Json::object()),
                             "include_usage", false);
    const std::string id =
        (chat ? "chatcmpl-" : "cmpl-") + std::to_string(next_id_++);
    Send(response, engine_.Ask(std::move(prompt), sampling),
         Frame(id, chat, stream), stream, usage);
  } catch (const BadRequest& bad) {
    Fail(response, bad);
  }

  // Returns the answer without its choices.
  Json Frame(const std::string& id, bool chat, bool stream) const {
    std::string object = chat ? "chat.completion" : "text_completion";
    if (chat && stream) object += ".chunk";
    return {{"id", id},
            {"object", object},
            {"created", std::time(nullptr)},
            {"model", name_}};
  }

  // Adds text to a frame, as a whole or as a part of a stream.
  static Json WithChoice(Json frame, bool stream, const std::string& text,
                         const std::string& finish) {
    Json choice = {{"index", 0},
                   {"logprobs", nullptr},
                   {"finish_reason", finish.empty() ? Json() : Json(finish)}};
    if (frame["object"] == "text_completion") {
      choice["text"] = text;
    } else {
      choice[stream ? "delta" : "message"] = {{"role", "assistant"},
                                              {"content", text}};
    }
    frame["choices"] = {choice};
    return frame;
  }

  static Json Usage(const Answer::Part& part) {
    return {{"prompt_tokens", part.prompt_tokens},
            {"completion_tokens", part.answer_tokens},
            {"total_tokens", part.prompt_tokens + part.answer_tokens},
            {"prompt_tokens_details", {{"cached_tokens", part.cached_tokens}}}};
  }

  // Sends an answer while it is made. If the client is gone, the engine stops.
  void Send(Response& response, std::shared_ptr<Answer> answer, Json frame,
            bool stream, bool usage) {
    const auto send = [=, whole = std::string()](
                          std::size_t, httplib::DataSink& sink) mutable {
      const Answer::Part part = answer->Next();
      const bool last = !part.finish.empty();
      std::string out;
      whole += part.text;
      if (stream) {
        const auto event = [&out](const Json& json) {
          out += "data: " + Dump(json) + "\n\n";
        };
        if (last || !part.text.empty()) {
          event(WithChoice(frame, true, part.text, part.finish));
        }
        if (last && usage) {
          Json end = frame;
          end["choices"] = Json::array();
          end["usage"] = Usage(part);
          event(end);
        }
        if (last) out += "data: [DONE]\n\n";
      } else if (last) {
        Json all = WithChoice(frame, false, whole, part.finish);
        all["usage"] = Usage(part);
        out = Dump(all);
      }
      if (!sink.is_writable() ||
          (!out.empty() && !sink.write(out.data(), out.size()))) {
        return false;
      }
      if (last) sink.done();
      return true;
    };
    response.set_chunked_content_provider(
        stream ? "text/event-stream" : "application/json", send,
        [answer](bool) { answer->Cancel(); });
  }

  std::string Metrics() const {
    const Counters all = engine_.counters();
    const kvtwin::SessionGauges& sessions = all.sessions;
    std::ostringstream out;
    const auto metric = [&out](const char* type, const char* name, auto value,
                               const char* help) {
      out << "# HELP kvtwin_" << name << " " << help << "\n# TYPE kvtwin_"
          << name << " " << type << "\nkvtwin_" << name << " " << value << "\n";
    };
    const char* counter = "counter";
    const char* gauge = "gauge";
    metric(counter, "requests_total", all.requests, "Requests");
    metric(counter, "cancelled_total", all.cancelled, "Clients that left");
    metric(counter, "prompt_tokens_total", sessions.prompt_tokens,
           "Tokens of prompts");
    metric(counter, "hit_tokens_total", sessions.hit_tokens,
           "Tokens of prompts that were in the cache");
    metric(counter, "evicted_tokens_total", sessions.evicted_tokens,
           "Tokens that made place for others");
    metric(counter, "answer_tokens_total", all.answer_tokens,
           "Tokens of answers");
    metric(counter, "batches_total", sessions.batches, "Passes of the model");
    metric(counter, "refusals_total", sessions.refusals,
           "Passes that the cache refused");
    metric(counter, "forward_seconds_total", all.forward_seconds,
           "Time in passes");
    metric(counter, "first_token_seconds_total", all.first_token_seconds,
           "Time from requests to first tokens");
    metric(gauge, "requests_waiting", all.waiting, "Requests without a slot");
    metric(gauge, "requests_running", sessions.running, "Requests with a slot");
    metric(gauge, "cells_used", all.cells_used, "Cells that hold a token");
    metric(gauge, "cells_free", all.cells - all.cells_used, "Free cells");
    metric(gauge, "conversations_parked", all.parked, "Files of conversations");
    return std::move(out).str();
  }

  const Options& options_;
  const std::string name_;
  Model& model_;
  const Tokenizer& tokenizer_;
  Engine& engine_;
  httplib::Server http_;
  std::atomic<std::int64_t> next_id_ = 1;
};

int Serve(const Options& options) {
  // Threads inherit the mask: only the thread that waits for them gets them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  const auto fail = [](const std::string& message) {
    std::cerr << "serve: " << message << "\n";
    return 1;
  };
  auto model =
      Model::Load(options.model, *kvtwin::DTypeFromName(options.weights));
  if (!model.ok()) return fail(model.status().message());
  const auto tokenizer = Tokenizer::Load(options.model + "/tokenizer.json");
  if (!tokenizer.ok()) return fail(tokenizer.status().message());
  if (tokenizer->size() > (*model)->config().vocab ||
      options.engine.context > (*model)->config().context) {
    return fail("the model has " + std::to_string((*model)->config().vocab) +
                " tokens and a context of " +
                std::to_string((*model)->config().context));
  }
  std::unique_ptr<ParkingLot> parked;
  if (!options.park.empty()) {
    // Rows of other weights would give other answers.
    const auto changed =
        std::filesystem::last_write_time(options.model + "/model.safetensors");
    parked = std::make_unique<ParkingLot>(
        options.park,
        options.model + " " + options.weights + " " +
            std::to_string(changed.time_since_epoch().count()),
        options.parked);
  }
  const auto engine =
      Engine::Make(**model, *tokenizer, options.engine, parked.get());
  if (!engine.ok()) return fail(engine.status().message());
  Server server(options, **model, *tokenizer, **engine);
  if (!server.Run(signals)) {
    return fail("cannot listen on " + options.host + ":" +
                std::to_string(options.port));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Serves a model by the protocol of OpenAI.", "serve");
  app.option_defaults()->always_capture_default();
  app.add_option("model", options.model, "Folder that convert.py made")
      ->required();
  app.add_option("--host", options.host, "Address to listen on");
  app.add_option("--port", options.port, "Port; 0: any that is free")
      ->check(CLI::Range(0, 65535));
  app.add_option("--slots", options.engine.slots, "Requests at a time")
      ->check(CLI::Range(1, 256));
  app.add_option("--context", options.engine.context, "Tokens of a request")
      ->check(CLI::Range(2, 1 << 20));
  app.add_option("--batch", options.engine.batch, "Tokens of a pass")
      ->check(CLI::Range(256, 8192));
  app.add_option("--threads", options.engine.threads, "Threads that compute")
      ->check(CLI::Range(1, 1024));
  app.add_option("--weights", options.weights, "Products of bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--rows", options.rows, "K and V of f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  app.add_flag("!--no-share", options.engine.share, "Reuse no prefixes");
  app.add_option("--park", options.park, "Folder for conversations on disk");
  app.add_option("--parked", options.parked, "Conversations on disk, at most")
      ->check(CLI::Range(1, 1 << 20));
  CLI11_PARSE(app, argc, argv);
  while (options.model.ends_with('/')) options.model.pop_back();
  options.engine.rows = *kvtwin::DTypeFromName(options.rows);
  return Serve(options);
}
