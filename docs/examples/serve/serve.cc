// An HTTP server of a model, which speaks the protocol of OpenAI.

#include <httplib.h>
#undef _res  // A macro of <resolv.h>, and a name in Eigen.
#include <pthread.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <ctime>
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
  std::string message;
  Json parameter = {};
  int status = 400;
  Json code = {};
};

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void Fail(Response& response, const BadRequest& bad) {
  response.status = bad.status;
  const Json error = {
      {"message", bad.message},
      {"type", bad.status < 500 ? "invalid_request_error" : "server_error"},
      {"param", bad.parameter},
      {"code", bad.code}};
  response.set_content(Dump({{"error", error}}), "application/json");
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

// Options that this server does not have may be given with a value that means
// that they are not used.
void RefuseOthers(const Json& body) {
  static const Json kUnused = Json::parse(R"({
      "n": 1, "best_of": 1, "echo": false, "suffix": "", "logprobs": false,
      "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
      "tools": [], "response_format": {"type": "text"}})");
  for (const auto& [name, unused] : kUnused.items()) {
    const Json value = body.value(name, unused);
    if (!value.is_null() && value != unused) {
      throw BadRequest{"'" + name + "' is not supported", name};
    }
  }
}

// Reads what both kinds of requests have. `room` is what the context has left
// for the answer.
std::shared_ptr<Answer> ReadRequest(const Json& body, const Tokens& prompt,
                                    int usual_max, int room) {
  RefuseOthers(body);
  auto answer = std::make_shared<Answer>();
  for (const std::int32_t token : prompt) {
    answer->prompt.push_back({.token = token});
  }
  const char* limit = body.contains("max_completion_tokens")
                          ? "max_completion_tokens"
                          : "max_tokens";
  answer->max_tokens =
      std::min(room, static_cast<int>(Range(body, limit, usual_max, 1, 1e9)));
  answer->temperature = Range(body, "temperature", 1, 0, 2);
  answer->top_p = Range(body, "top_p", 1, 0, 1);
  answer->random.seed(
      Field<std::uint64_t>(body, "seed", std::random_device()()));
  const Json stop = Field(body, "stop", Json::array());
  const Json list = {{"stop", stop.is_array() ? stop : Json::array({stop})}};
  answer->stop = Field(list, "stop", answer->stop);
  std::erase(answer->stop, "");
  if (answer->stop.size() > 4) {
    throw BadRequest{"'stop' has more than 4 strings", "stop"};
  }
  return answer;
}

// Adds text to the frame of an answer, as a whole or as a part of a stream.
Json WithChoice(Json frame, bool stream, const Engine::Part& part) {
  Json choice = {
      {"index", 0}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
  if (!part.finish.empty()) choice["finish_reason"] = part.finish;
  if (frame["object"] == "text_completion") {
    choice["text"] = part.text;
  } else {
    choice[stream ? "delta" : "message"] = {{"role", "assistant"},
                                            {"content", part.text}};
  }
  frame["choices"] = {choice};
  return frame;
}

Json Usage(const Answer& answer) {
  return {{"prompt_tokens", answer.prompt.size()},
          {"completion_tokens", answer.tokens},
          {"total_tokens",
           answer.prompt.size() + static_cast<std::size_t>(answer.tokens)},
          {"prompt_tokens_details", {{"cached_tokens", answer.cached}}}};
}

class Server {
 public:
  Server(const Options& options, const Model& model, const Tokenizer& tokenizer,
         Engine& engine)
      : options_(options),
        name_(std::filesystem::path(options.model).filename().string()),
        vocab_(model.config().vocab),
        tokenizer_(tokenizer),
        engine_(engine) {
    http_.new_task_queue = [] { return new httplib::ThreadPool(128); };
    http_.set_payload_max_length(std::size_t{16} << 20);
    http_.set_tcp_nodelay(true);
    http_.Post("/v1/completions", [this](const auto& request, auto& response) {
      Complete(request, response, false);
    });
    http_.Post("/v1/chat/completions",
               [this](const auto& request, auto& response) {
                 Complete(request, response, true);
               });
    Json models = Json::parse(R"({"object": "list", "data": [
        {"object": "model", "created": 0, "owned_by": "kvtwin"}]})");
    models["data"][0]["id"] = name_;
    const auto page = [this](const char* path, const char* type, auto text) {
      http_.Get(path, [type, text](const Request&, Response& response) {
        response.set_content(text(), type);
      });
    };
    page("/v1/models", "application/json", [models] { return Dump(models); });
    page("/health", "application/json", [] { return R"({"status":"ok"})"; });
    page("/metrics", "text/plain; version=0.0.4",
         [this] { return engine_.Metrics(); });
    http_.set_error_handler([](const Request&, Response& response) {
      if (response.body.empty()) {
        Fail(response, {.message = "no such page", .status = response.status});
      }
    });
  }

  // Serves until a signal comes. Throws if the port is taken.
  void Run(const sigset_t& signals) {
    const char* host = options_.host.c_str();
    const int port =
        options_.port > 0 ? options_.port : http_.bind_to_any_port(host);
    if (port < 0 || (options_.port > 0 && !http_.bind_to_port(host, port))) {
      throw std::runtime_error("cannot listen on that port");
    }
    std::cout << "http://" << host << ":" << port << std::endl;
    std::thread listening([this] { http_.listen_after_bind(); });
    int signal = 0;
    sigwait(&signals, &signal);
    http_.stop();
    listening.join();
  }

 private:
  // The template of SmolLM2, as in its tokenizer_config.json. Special tokens in
  // the messages are text.
  Tokens ChatPrompt(const Json& body) const {
    Tokens tokens;
    const auto add = [&](const std::string& text, bool special) {
      const Tokens added = tokenizer_.Encode(text, special);
      tokens.insert(tokens.end(), added.begin(), added.end());
    };
    Json messages = Field(body, "messages", Json());
    if (!messages.is_array() || messages.empty()) {
      throw BadRequest{"'messages' is not a list of messages", "messages"};
    }
    if (Field<std::string>(messages[0], "role", "") != "system") {
      const Json system = {{"role", "system"},
                           {"content",
                            "You are a helpful AI assistant named SmolLM, "
                            "trained by Hugging Face"}};
      messages.insert(messages.begin(), system);
    }
    for (const Json& message : messages) {
      const auto role = Field<std::string>(message, "role", "");
      if (role != "system" && role != "user" && role != "assistant") {
        throw BadRequest{"a message has the role '" + role + "'", "messages"};
      }
      const Json content = Field(message, "content", Json(""));
      std::string text;
      if (!content.is_array())
        text = Field<std::string>(message, "content", "");
      for (const Json& part : content.is_array() ? content : Json::array()) {
        text += Field<std::string>(part, "text", "");
      }
      add("<|im_start|>", true);
      add(role + "\n" + text, false);
      add("<|im_end|>", true);
      add("\n", false);
    }
    add("<|im_start|>", true);
    add("assistant\n", false);
    return tokens;
  }

  // A text, tokens, or a list with one of these.
  Tokens TextPrompt(const Json& body) const {
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
      if (token < 0 || token >= vocab_) {
        throw BadRequest{"'prompt' has the token " + std::to_string(token),
                         "prompt"};
      }
    }
    return tokens;
  }

  void Complete(const Request& request, Response& response, bool chat) try {
    const Json body = Json::parse(request.body, nullptr, false);
    if (!body.is_object()) throw BadRequest{"the body is not a JSON object"};
    const std::string model = Field<std::string>(body, "model", name_);
    if (model != name_) {
      throw BadRequest{"the model '" + model + "' does not exist", "model", 404,
                       "model_not_found"};
    }
    const Tokens prompt = chat ? ChatPrompt(body) : TextPrompt(body);
    if (prompt.empty()) throw BadRequest{"the prompt is empty", "prompt"};
    const int context = options_.engine.sessions.context;
    const bool shifts = options_.engine.keep >= 0;
    const int room = context - static_cast<int>(prompt.size());
    if (room < 1 && !shifts) {
      throw BadRequest{"the prompt has " + std::to_string(prompt.size()) +
                           " tokens; the context is " + std::to_string(context),
                       chat ? "messages" : "prompt", 400,
                       "context_length_exceeded"};
    }
    // Without max_tokens, an answer has at most a context.
    const int usual_max = !chat ? 16 : shifts ? context : room;
    const auto answer =
        ReadRequest(body, prompt, usual_max, shifts ? INT_MAX : room);
    const bool stream = Field(body, "stream", false);
    const bool usage = Field(Field(body, "stream_options", Json::object()),
                             "include_usage", false);
    const Json frame = {
        {"id", (chat ? "chatcmpl-" : "cmpl-") + std::to_string(next_id_++)},
        {"object", !chat    ? "text_completion"
                   : stream ? "chat.completion.chunk"
                            : "chat.completion"},
        {"created", std::time(nullptr)},
        {"model", name_}};
    engine_.Ask(answer);
    Send(response, answer, frame, stream, usage);
  } catch (const BadRequest& bad) {
    Fail(response, bad);
  }

  // Sends an answer while it is made. If the client is gone, the engine stops.
  void Send(Response& response, std::shared_ptr<Answer> answer,
            const Json& frame, bool stream, bool usage) {
    const auto send = [=, this, whole = std::string()](
                          std::size_t, httplib::DataSink& sink) mutable {
      Engine::Part part = engine_.Next(*answer);
      const bool last = !part.finish.empty();
      std::string out;
      const auto event = [&out](const std::string& data) {
        out += "data: " + data + "\n\n";
      };
      whole += part.text;
      if (stream && (last || !part.text.empty())) {
        event(Dump(WithChoice(frame, true, part)));
      }
      Json end = frame;
      if (last && stream) {
        end.update({{"choices", Json::array()}, {"usage", Usage(*answer)}});
        if (usage) event(Dump(end));
        event("[DONE]");
      } else if (last) {
        end = WithChoice(frame, false, {whole, part.finish});
        end["usage"] = Usage(*answer);
        out = Dump(end);
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
        [answer](bool) { answer->cancelled = true; });
  }

  const Options& options_;
  const std::string name_;
  const int vocab_;
  const Tokenizer& tokenizer_;
  Engine& engine_;
  httplib::Server http_;
  std::atomic<std::int64_t> next_id_ = 1;
};

void Serve(const Options& options) {
  // Threads inherit the mask: only the thread that waits for them gets them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  Model model(options.model, *kvtwin::DTypeFromName(options.weights));
  const Tokenizer tokenizer(options.model + "/serve.json",
                            model.config().vocab);
  if (options.engine.sessions.context > model.config().context) {
    throw std::runtime_error("the model has a context of " +
                             std::to_string(model.config().context));
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
  Engine engine(model, tokenizer, options.engine, parked.get());
  Server(options, model, tokenizer, engine).Run(signals);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  kvtwin::SessionsSpec& sessions = options.engine.sessions;
  CLI::App app("Serves a model by the protocol of OpenAI.", "serve");
  app.option_defaults()->always_capture_default();
  const auto number = [&app](const char* name, auto& value, int min, int max,
                             const char* help) {
    app.add_option(name, value, help)->check(CLI::Range(min, max));
  };
  app.add_option("model", options.model, "Folder that convert.py made")
      ->required();
  app.add_option("--host", options.host, "Address to listen on");
  number("--port", options.port, 0, 65535, "Port; 0: any that is free");
  number("--slots", sessions.slots, 1, 256, "Requests at a time");
  number("--context", sessions.context, 2, 1 << 20, "Tokens of a request");
  number("--batch", sessions.batch, 256, 8192, "Tokens of a pass");
  number("--shift", options.engine.keep, -1, 1 << 20,
         "A full context keeps this many of its first tokens, and drops the "
         "older half of the others; -1: the answer ends instead");
  number("--threads", options.engine.threads, 1, 1024, "Threads that compute");
  app.add_option("--weights", options.weights, "Products of bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--rows", options.rows, "K and V of f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  app.add_flag("!--no-share", options.engine.share, "Reuse no prefixes");
  app.add_option("--park", options.park, "Folder for conversations on disk");
  number("--parked", options.parked, 1, 1 << 20,
         "Conversations on disk, at most");
  CLI11_PARSE(app, argc, argv);
  while (options.model.ends_with('/')) options.model.pop_back();
  options.engine.rows = *kvtwin::DTypeFromName(options.rows);
  try {
    Serve(options);
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << "\n";
    return 1;
  }
}
