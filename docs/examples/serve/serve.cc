// An HTTP server of a model, which speaks the protocol of OpenAI.

#include <httplib.h>
#include <kvtwin/serving.h>
#include <omp.h>
#undef _res  // A macro of <resolv.h>, and a name in Eigen.

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <ctime>
#include <iostream>
#include <random>
#include <set>

#include "model.h"
#include "tokenizer.h"

namespace {

using namespace serve;
using httplib::Request, httplib::Response;
using std::filesystem::path;

struct Options {
  std::string model;             // The folder that convert.py made.
  std::string weights = "bf16";  // Products are of f32 or bf16.
  std::string rows = "f16";      // K and V.
  int threads = 2;
  kvtwin::ServiceSpec service = {
      .sessions = {.slots = 16, .context = 4096, .batch = 512},
      .log = [](const auto& status) {
        std::cerr << "park: " << status.ToString() << "\n";
      }};
};

// An error of a request. It is answered in OpenAI's shape.
struct BadRequest {
  std::string message;
  Json parameter = {};
  int status = 400;
  Json code = {};
};

void Require(bool good, const std::string& name, const std::string& message) {
  if (!good) throw BadRequest{"'" + name + "' " + message, name};
}

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

// The fields of a request, beside those below: the value that stands for an
// absent one or null, and the range. Fields that this server does not have may
// be given with the only value that means that they are not used.
const Json kFields = Json::parse(R"({
    "max_tokens": [0, 1, 1e9], "max_completion_tokens": [0, 1, 1e9],
    "temperature": [1, 0, 2], "top_p": [1, 0, 1], "seed": [-1, -9e18, 9e18],
    "stop": [[]], "stream": [false], "stream_options": [{}],
    "n": [1, 1, 1], "best_of": [1, 1, 1], "echo": [false, false, false],
    "suffix": ["", "", ""], "logprobs": [false, false, false],
    "presence_penalty": [0, 0, 0], "frequency_penalty": [0, 0, 0],
    "logit_bias": [{}, {}, {}], "tools": [[], [], []], "response_format":
    [{"type": "text"}, {"type": "text"}, {"type": "text"}]})");
// Fields that are read elsewhere, or do not change an answer.
const std::set<std::string> kOtherFields = {
    "model",           "prompt", "messages",     "user",
    "metadata",        "store",  "service_tier", "safety_identifier",
    "prompt_cache_key"};

Json ReadFields(const Json& body) {
  for (const auto& [name, value] : body.items()) {
    Require(kFields.contains(name) || kOtherFields.contains(name) ||
                value.is_null(),
            name, "is not supported");
  }
  Json fields;
  for (const auto& [name, rule] : kFields.items()) {
    Json value = body.value(name, Json());
    if (name == "stop" && value.is_string()) value = Json::array({value});
    if (value.is_null()) {
      value = rule[0];
    } else {
      const bool typed = value.type() == rule[0].type() ||
                         (value.is_number() && rule[0].is_number());
      const bool inside =
          rule.size() == 1 || (value >= rule[1] && value <= rule[2]);
      Require(typed && inside, name,
              "has a wrong type or value, default and range are " + Dump(rule));
    }
    fields[name] = value;
  }
  Require(fields["stop"].size() <= 4, "stop", "has more than 4 strings");
  return fields;
}

// Answers requests.
struct Api {
  // Refuses a prompt that is longer than the context.
  void RequireRoom(bool enough, bool chat, const std::string& size) const {
    if (enough || shifts) return;
    throw BadRequest{"the prompt has " + size + "; the context is " +
                         std::to_string(context) + " tokens",
                     chat ? "messages" : "prompt", 400,
                     "context_length_exceeded"};
  }

  // Adds the tokens of a text, unless its bytes are too many for a context.
  // Special tokens are found in a prompt; those in a chat's messages are text.
  void Encode(const std::string& text, bool chat, Tokens& tokens) const {
    RequireRoom(text.size() <= tokenizer.longest() * context, chat,
                std::to_string(text.size()) + " bytes");
    tokenizer.Encode(text, !chat, tokens);
  }

  // The template of SmolLM2, as in its tokenizer_config.json.
  Tokens ChatPrompt(const Json& body) const try {
    Json messages = body.value("messages", Json::array());
    if (messages.at(0).value("role", "") != "system") {
      const Json system = {{"role", "system"},
                           {"content",
                            "You are a helpful AI assistant named SmolLM, "
                            "trained by Hugging Face"}};
      messages.insert(messages.begin(), system);
    }
    Tokens tokens;
    for (const Json& message : messages) {
      const std::string role = message.at("role");
      Require(role == "system" || role == "user" || role == "assistant",
              "messages", "has the role '" + role + "'");
      std::string text = role + "\n";
      const Json content = message.at("content");
      if (content.is_string()) text += content.get<std::string>();
      for (const Json& part : content.is_array() ? content : Json::array()) {
        text += part.at("text").get<std::string>();
      }
      tokenizer.Encode("<|im_start|>", true, tokens);
      Encode(text, true, tokens);
      tokenizer.Encode("<|im_end|>", true, tokens);
      tokenizer.Encode("\n", false, tokens);
    }
    tokenizer.Encode("<|im_start|>assistant\n", true, tokens);
    return tokens;
  } catch (const Json::exception& error) {
    throw BadRequest{error.what(), "messages"};
  }

  // A text, tokens, or a list with one of these.
  Tokens TextPrompt(const Json& body) const {
    Json prompt = body.value("prompt", Json(""));
    if (prompt.is_array() && prompt.size() == 1 && !prompt[0].is_number()) {
      prompt = Json(prompt[0]);
    }
    Tokens tokens;
    if (prompt.is_string()) {
      Encode(prompt.get<std::string>(), false, tokens);
    }
    Require(prompt.is_string() || prompt.is_array(), "prompt",
            "has a wrong type");
    for (const Json& token : prompt.is_array() ? prompt : Json::array()) {
      Require(token.is_number_integer() && token >= 0 && token < vocab,
              "prompt", "has the token " + Dump(token));
      tokens.push_back({token});
    }
    return tokens;
  }

  void Complete(const Request& request, Response& response, bool chat) try {
    // Copies of values recurse: deep values would overflow the stack.
    const auto keep = [](int depth, Json::parse_event_t, Json&) {
      if (depth > 64) throw BadRequest{"the body is nested too deeply"};
      return true;
    };
    const Json body = Json::parse(request.body, keep, false);
    if (!body.is_object()) throw BadRequest{"the body is not a JSON object"};
    const Json wanted = body.value("model", Json(name));
    if (wanted != name) {
      throw BadRequest{"the model " + Dump(wanted) + " does not exist", "model",
                       404, "model_not_found"};
    }
    const Json fields = ReadFields(body);
    kvtwin::ServiceRequest ask;
    ask.prompt = chat ? ChatPrompt(body) : TextPrompt(body);
    const int size = static_cast<int>(ask.prompt.size());
    Require(size > 0, "prompt", "is empty");
    RequireRoom(size < context, chat, std::to_string(size) + " tokens");
    ask.limit = std::max(fields["max_tokens"].get<int>(),
                         fields["max_completion_tokens"].get<int>());
    // Without a limit, an answer to a chat has at most a context.
    if (ask.limit == 0) ask.limit = chat ? context : 16;
    if (!shifts) ask.limit = std::min<std::int64_t>(ask.limit, context - size);
    fields["stop"].get_to(ask.stops);
    const std::int64_t seed = fields["seed"];
    ask.sample = kvtwin::Sampler(fields["temperature"], fields["top_p"],
                                 seed == -1 ? std::random_device()() : seed);
    const bool stream = fields["stream"];
    const bool usage = fields["stream_options"].value("include_usage", false);
    const Json frame = {
        {"id", (chat ? "chatcmpl-" : "cmpl-") + std::to_string(next_id++)},
        {"object", !chat    ? "text_completion"
                   : stream ? "chat.completion.chunk"
                            : "chat.completion"},
        {"created", std::time(nullptr)},
        {"model", name}};
    Send(response, service.Ask(std::move(ask)), frame, size, chat, stream,
         usage);
  } catch (const BadRequest& bad) {
    Fail(response, bad);
  } catch (const Json::exception& error) {
    Fail(response, {error.what()});
  }

  // Sends an answer, whole or while it is made. If the client is gone, the
  // response drops the answer, which ends.
  void Send(Response& response, std::shared_ptr<kvtwin::Answer> answer,
            const Json& frame, int prompt, bool chat, bool stream,
            bool with_usage) {
    const auto send = [=](std::size_t, httplib::DataSink& sink) {
      const kvtwin::AnswerPart next =
          answer->Next(!stream, std::chrono::milliseconds(100));
      const bool last = next.finish != kvtwin::Finish::kNone;
      if (!next.status.ok()) {  // The service has failed.
        std::cerr << "serve: " << next.status.ToString() << "\n";
        std::_Exit(1);
      }
      const Json usage = {
          {"prompt_tokens", prompt},
          {"completion_tokens", next.tokens},
          {"total_tokens", prompt + next.tokens},
          {"prompt_tokens_details", {{"cached_tokens", next.reused}}}};
      std::string out;
      const auto add = [&](const Json& choices, bool last_part) {
        Json part = frame;
        part["choices"] = choices;
        if (last_part) part["usage"] = usage;
        out += stream ? "data: " + Dump(part) + "\n\n" : Dump(part);
      };
      if (last || !next.text.empty()) {
        const Json finish =
            next.finish == kvtwin::Finish::kStop ? "stop" : "length";
        Json choice = {{"index", 0},
                       {"logprobs", nullptr},
                       {"finish_reason", last ? finish : Json()}};
        const Json message = {{"role", "assistant"}, {"content", next.text}};
        choice.update(chat ? Json{{stream ? "delta" : "message", message}}
                           : Json{{"text", next.text}});
        add(Json::array({choice}), last && !stream);
      }
      if (last && stream && with_usage) add(Json::array(), true);
      if (last && stream) out += "data: [DONE]\n\n";
      if (!sink.is_writable() ||
          (!out.empty() && !sink.write(out.data(), out.size()))) {
        return false;
      }
      if (last) sink.done();
      return true;
    };
    response.set_chunked_content_provider(
        stream ? "text/event-stream" : "application/json", send);
  }

  const std::string name;
  const int vocab, context;
  const bool shifts;
  const Tokenizer& tokenizer;
  kvtwin::Service& service;
  std::atomic<std::int64_t> next_id = 1;
};

// Serves the API until a signal comes.
void Listen(Api& api, const std::string& host, int port) {
  static httplib::Server http;
  http.new_task_queue = [] { return new httplib::ThreadPool(128); };
  http.set_payload_max_length(std::size_t{16} << 20);
  http.set_tcp_nodelay(true);
  for (const bool chat : {false, true}) {
    http.Post(chat ? "/v1/chat/completions" : "/v1/completions",
              [&api, chat](const Request& request, Response& response) {
                api.Complete(request, response, chat);
              });
  }
  const auto page = [](const char* path, const char* type, auto text) {
    http.Get(path, [type, text](const Request&, Response& response) {
      response.set_content(text(), type);
    });
  };
  const Json models = {{"object", "list"},
                       {"data",
                        {{{"id", api.name},
                          {"object", "model"},
                          {"created", 0},
                          {"owned_by", "kvtwin"}}}}};
  page("/v1/models", "application/json", [models] { return Dump(models); });
  page("/health", "application/json", [] { return R"({"status":"ok"})"; });
  page("/metrics", "text/plain; version=0.0.4",
       [&api] { return api.service.Metrics(); });
  http.set_error_handler([](const Request&, Response& response) {
    if (response.body.empty()) {
      Fail(response, {.message = "no such page", .status = response.status});
    }
  });

  const bool any = port == 0;
  if (any) port = http.bind_to_any_port(host.c_str());
  if (any ? port < 0 : !http.bind_to_port(host.c_str(), port)) {
    throw std::runtime_error("cannot listen on that port");
  }
  // `stop` only closes a socket, which a handler of signals may do.
  for (const int signal : {SIGINT, SIGTERM}) {
    std::signal(signal,
                [](int) { http.is_running() ? http.stop() : std::_Exit(0); });
  }
  std::cout << "http://" << host << ":" << port << std::endl;
  http.listen_after_bind();
}

void Serve(Options options, const std::string& host, int port) {
  const kvtwin::SessionsSpec& sessions = options.service.sessions;
  kvtwin::ParkingSpec& parking = options.service.parking;
  Llama model(options.model, *kvtwin::DTypeFromName(options.weights));
  const Tokenizer tokenizer(options.model, model.config.vocab);
  if (sessions.context > model.config.context) {
    throw std::runtime_error("the model has a context of " +
                             std::to_string(model.config.context));
  }
  // Rows of other weights would give other answers.
  const auto changed =
      last_write_time(path(options.model) / "model.safetensors");
  parking.model = options.model + " " + options.weights + " " +
                  std::to_string(changed.time_since_epoch().count());
  parking.rows = *kvtwin::DTypeFromName(options.rows);
  const auto cache = model.MakeCache(kvtwin::InitOf(sessions, parking.rows));
  const auto forward = [&, logits = Rows()](kvtwin::Cache& cells,
                                            const auto& batch) mutable {
    omp_set_num_threads(options.threads);  // For the service's thread.
    logits = model.Forward(cells, batch);
    return std::span<const float>(logits.data(), logits.size());
  };
  const auto service = Value(kvtwin::MakeService(
      *cache, options.service,
      {forward, [&](int token) { return tokenizer.Bytes(token); },
       model.config.end}));
  Api api{path(options.model).filename(), model.config.vocab, sessions.context,
          options.service.keep >= 0,      tokenizer,          *service};
  Listen(api, host, port);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  kvtwin::SessionsSpec& sessions = options.service.sessions;
  std::string host = "127.0.0.1";
  int port = 8080;
  CLI::App app("Serves a model by the protocol of OpenAI.", "serve");
  app.option_defaults()->always_capture_default();
  const auto number = [&app](const char* name, auto& value, int min, int max,
                             const char* help) {
    app.add_option(name, value, help)->check(CLI::Range(min, max));
  };
  app.add_option("model", options.model, "Folder that convert.py made")
      ->required();
  app.add_option("--host", host, "Address to listen on");
  number("--port", port, 0, 65535, "Port; 0: any that is free");
  number("--slots", sessions.slots, 1, 256, "Requests at a time");
  number("--context", sessions.context, 2, 1 << 20, "Tokens of a request");
  number("--batch", sessions.batch, 256, 8192, "Tokens of a pass");
  number("--shift", options.service.keep, -1, 1 << 20,
         "A full context keeps this many of its first tokens, and drops the "
         "older half of the others; -1: the answer ends instead");
  number("--threads", options.threads, 1, 1024, "Threads that compute");
  app.add_option("--weights", options.weights, "Products of bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--rows", options.rows, "K and V of f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  app.add_flag("!--no-share", options.service.share, "Reuse no prefixes");
  app.add_option("--park", options.service.parking.folder,
                 "Folder for conversations on disk");
  number("--parked", options.service.parking.limit, 1, 1 << 20,
         "Conversations on disk, at most");
  CLI11_PARSE(app, argc, argv);
  while (options.model.ends_with('/')) options.model.pop_back();
  try {
    Serve(options, host, port);
  } catch (const std::exception& error) {
    std::cerr << "serve: " << error.what() << "\n";
    return 1;
  }
}
