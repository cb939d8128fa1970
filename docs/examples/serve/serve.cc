// An HTTP server of a model, which speaks the protocol of OpenAI.

#include <httplib.h>
#include <kvtwin/serving.h>
#undef _res  // A macro of <resolv.h>, and a name in Eigen.

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <ctime>
#include <future>
#include <iostream>
#include <random>

#include "model.h"
#include "tokenizer.h"

namespace {

using namespace serve;
using httplib::Request, httplib::Response;

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

// The fields of a request: the value that stands for an absent one or null, and
// the range. Fields that this server does not have may be given with the only
// value that means that they are not used. Those of null are read elsewhere, or
// do not change an answer.
const Json kFields = Json::parse(R"({
    "max_tokens": [0, 1, 1e9], "max_completion_tokens": [0, 1, 1e9],
    "temperature": [1, 0, 2], "top_p": [1, 0, 1], "seed": [-1, -9e18, 9e18],
    "stop": [[]], "stream": [false], "stream_options": [{}], "messages": [[]],
    "n": [1, 1, 1], "best_of": [1, 1, 1], "echo": [false, false, false],
    "suffix": ["", "", ""], "logprobs": [false, false, false],
    "presence_penalty": [0, 0, 0], "frequency_penalty": [0, 0, 0],
    "logit_bias": [{}, {}, {}], "tools": [[], [], []], "response_format":
    [{"type": "text"}, {"type": "text"}, {"type": "text"}],
    "model": [null], "prompt": [null], "user": [null], "metadata": [null],
    "store": [null], "service_tier": [null], "safety_identifier": [null],
    "prompt_cache_key": [null]})");

Json ReadFields(const Json& body) {
  Json fields;
  for (const auto& [name, rule] : kFields.items()) fields[name] = rule[0];
  for (const auto& [name, value] : body.items()) {
    if (value.is_null()) continue;
    Require(kFields.contains(name), name, "is not supported");
    const Json& rule = kFields[name];
    Json& field = fields[name] = value;
    if (name == "stop" && value.is_string()) field = Json::array({value});
    const bool typed = rule[0].is_null() || field.type() == rule[0].type() ||
                       (field.is_number() && rule[0].is_number());
    Require(
        typed && (rule.size() == 1 || (field >= rule[1] && field <= rule[2])),
        name, "has a wrong type or value, default and range are " + Dump(rule));
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
  Tokens ChatPrompt(const Json& messages) const try {
    Tokens tokens;
    if (messages.at(0).value("role", "") != "system") {
      tokenizer.Encode(
          "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
          "trained by Hugging Face<|im_end|>\n",
          true, tokens);
    }
    for (const Json& message : messages) {
      const std::string role = message.at("role");
      Require(role == "system" || role == "user" || role == "assistant",
              "messages", "has the role '" + role + "'");
      Json content = message.at("content");
      if (content.is_string()) content = Json::array({{{"text", content}}});
      std::string text = role + "\n";
      for (auto& part : content) text += part.at("text").get<std::string>();
      tokenizer.Encode("<|im_start|>", true, tokens);
      Encode(text, true, tokens);
      tokenizer.Encode("<|im_end|>\n", true, tokens);
    }
    tokenizer.Encode("<|im_start|>assistant\n", true, tokens);
    return tokens;
  } catch (const Json::exception& error) {
    throw BadRequest{error.what(), "messages"};
  }

  // A text, tokens, or a list with one of these.
  Tokens TextPrompt(Json prompt) const {
    if (prompt.is_array() && prompt.size() == 1 && !prompt[0].is_number()) {
      prompt = Json(prompt[0]);
    }
    Tokens tokens;
    if (prompt.is_string()) {
      Encode(prompt.get<std::string>(), false, tokens);
      return tokens;
    }
    Require(prompt.is_array(), "prompt", "has a wrong type");
    for (const Json& token : prompt) {
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
    const Json fields = ReadFields(body);
    if (const Json& model = fields["model"];
        !model.is_null() && model != name) {
      throw BadRequest{"the model " + Dump(model) + " does not exist", "model",
                       404, "model_not_found"};
    }
    kvtwin::ServiceRequest ask;
    ask.prompt =
        chat ? ChatPrompt(fields["messages"]) : TextPrompt(fields["prompt"]);
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
    auto answer = service.Ask(std::move(ask));
    if (!answer.ok()) throw BadRequest{answer.status().message(), {}, 503};
    Send(response, *std::move(answer), frame, size, chat, stream, usage);
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
      if (next.finish == kvtwin::Finish::kFailed) {
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
        const Json message = {{"role", "assistant"}, {"content", next.text}};
        const Json finish =
            next.finish == kvtwin::Finish::kStop ? "stop" : "length";
        Json choice = {{"index", 0},
                       {"logprobs", nullptr},
                       {"finish_reason", last ? finish : Json()}};
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

// Throws if so many threads cannot run at once: httplib would hang.
void TryThreads(int count) {
  if (count > 0) std::async(std::launch::async, TryThreads, count - 1).get();
}

// Serves the API until a signal comes.
void Listen(Api& api, const std::string& host, int port, int threads) {
  static httplib::Server http;
  TryThreads(threads);
  http.new_task_queue = [threads] { return new httplib::ThreadPool(threads); };
  http.set_payload_max_length(std::size_t{16} << 20);
  http.set_tcp_nodelay(true);
  http.Post("/v1/(chat/)?completions",
            [&api](const Request& request, Response& response) {
              api.Complete(request, response, request.matches[1].matched);
            });
  const auto page = [](const char* path, const char* type, auto text) {
    http.Get(path, [type, text](const Request&, Response& response) {
      response.set_content(text(), type);
    });
  };
  const Json model = {{"id", api.name},
                      {"object", "model"},
                      {"created", 0},
                      {"owned_by", "kvtwin"}};
  const Json models = {{"object", "list"}, {"data", Json::array({model})}};
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
  const auto end = [](int) { http.is_running() ? http.stop() : std::_Exit(0); };
  std::signal(SIGINT, end);
  std::signal(SIGTERM, end);
  std::cout << "http://" << host << ":" << port << std::endl;
  http.listen_after_bind();
}

// oneDNN has products of bf16 with AVX-512, whose bit this is.
const auto kDType = int(dnnl::get_effective_cpu_isa()) & 0x20 ? "bf16" : "f32";

}  // namespace

int main(int argc, char** argv) {
  std::string model, weights = kDType, rows = "f16", host = "127.0.0.1";
  int port = 8080;
  kvtwin::ServiceSpec spec = {
      .sessions = {.slots = 16, .context = 4096, .batch = 512},
      .queue = 64,
      .log = [](const auto& status) {
        std::cerr << "park: " << status.ToString() << "\n";
      }};
  CLI::App app("Serves a model by the protocol of OpenAI.", "serve");
  app.option_defaults()->always_capture_default();
  app.add_option("model", model, "Folder that convert.py made")->required();
  app.add_option("--host", host, "Address to listen on");
  app.add_option("--port", port, "Port; 0: any that is free")
      ->check(CLI::Range(0, 65535));
  app.add_option("--slots", spec.sessions.slots, "Requests at a time")
      ->check(CLI::Range(1, 256));
  app.add_option("--queue", spec.queue, "Requests that wait; 0: no limit")
      ->check(CLI::Range(0, 1024));
  app.add_option("--context", spec.sessions.context, "Tokens of a request");
  app.add_option("--batch", spec.sessions.batch, "Tokens of a pass");
  app.add_option(
      "--shift", spec.keep,
      "First tokens that a full context keeps, with half of the others; -1: "
      "the answer ends");
  app.add_option("--weights", weights, "Products of bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--rows", rows, "K and V of f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  app.add_flag("!--no-share", spec.share, "Reuse no prefixes");
  app.add_option("--park", spec.parking.folder, "Folder of conversations");
  app.add_option("--parked", spec.parking.limit, "Conversations on disk");
  CLI11_PARSE(app, argc, argv);
  try {
    const std::filesystem::path file = model + "/model.safetensors";
    const Json json = Json::parse(std::ifstream(model + "/serve.json"));
    Llama llama(json.at("model"), file, weights == "bf16");
    const Tokenizer tokenizer(json.at("tokenizer"), llama.config.vocab);
    int& context = spec.sessions.context;
    context = std::min(context, llama.config.context);
    // Rows of other weights would give other answers.
    const auto changed = last_write_time(file).time_since_epoch().count();
    spec.parking.model =
        file.string() + " " + weights + " " + std::to_string(changed);
    spec.parking.rows = *kvtwin::DTypeFromName(rows);
    const auto cache =
        llama.MakeCache(kvtwin::InitOf(spec.sessions, spec.parking.rows));
    const auto forward = [&, logits = Rows()](kvtwin::Cache& cells,
                                              const auto& batch) mutable {
      logits = llama.Forward(cells, batch);
      return std::span<const float>(logits.data(), logits.size());
    };
    const auto bytes = [&](int token) { return tokenizer.Bytes(token); };
    const auto service = Value(
        kvtwin::MakeService(*cache, spec, {forward, bytes, llama.config.end}));
    Api api{file.parent_path().filename(),
            llama.config.vocab,
            context,
            spec.keep >= 0,
            tokenizer,
            *service};
    // More threads than answers, so that other requests are refused at once.
    Listen(api, host, port, spec.sessions.slots + spec.queue + 16);
  } catch (const std::exception& error) {
    std::cerr << "serve " << model << ": " << error.what() << "\n";
    return 1;
  }
}
