// An HTTP server of a model, which speaks the protocol of OpenAI.

#include <httplib.h>
#undef _res  // A macro of <resolv.h>, and a name in Eigen.

#include <CLI/CLI.hpp>
#include <csignal>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>

#include "engine.h"

namespace {

using namespace serve;
using httplib::Request, httplib::Response;
using Json = nlohmann::json;

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

// The fields of a request, beside the prompt: the value that stands for an
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

Json ReadFields(const Json& body) {
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

Json Usage(const Answer& answer) {
  const int prompt = static_cast<int>(answer.prompt.size());
  return {{"prompt_tokens", prompt},
          {"completion_tokens", answer.tokens},
          {"total_tokens", prompt + answer.tokens},
          {"prompt_tokens_details", {{"cached_tokens", answer.info.reused}}}};
}

// Answers requests.
struct Api {
  // The template of SmolLM2, as in its tokenizer_config.json. Special tokens in
  // the messages are text.
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
      tokenizer.Encode(text, false, tokens);
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
      tokenizer.Encode(prompt.get<std::string>(), true, tokens);
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
    auto answer = std::make_shared<Answer>();
    answer->prompt = chat ? ChatPrompt(body) : TextPrompt(body);
    const int size = static_cast<int>(answer->prompt.size());
    Require(size > 0, "prompt", "is empty");
    const bool shifts = options.keep >= 0;
    const int context = options.sessions.context, room = context - size;
    if (room < 1 && !shifts) {
      throw BadRequest{"the prompt has " + std::to_string(size) +
                           " tokens; the context is " + std::to_string(context),
                       chat ? "messages" : "prompt", 400,
                       "context_length_exceeded"};
    }
    int limit = std::max(fields["max_tokens"].get<int>(),
                         fields["max_completion_tokens"].get<int>());
    // Without a limit, an answer to a chat has at most a context.
    if (limit == 0) limit = chat ? context : 16;
    answer->max_tokens = shifts ? limit : std::min(limit, room);
    fields["temperature"].get_to(answer->temperature);
    fields["top_p"].get_to(answer->top_p);
    answer->shown = kvtwin::AnswerText(fields["stop"]);
    const std::int64_t seed = fields["seed"];
    answer->random.seed(seed == -1 ? std::random_device()() : seed);
    const bool stream = fields["stream"];
    const bool usage = fields["stream_options"].value("include_usage", false);
    const Json frame = {
        {"id", (chat ? "chatcmpl-" : "cmpl-") + std::to_string(next_id++)},
        {"object", !chat    ? "text_completion"
                   : stream ? "chat.completion.chunk"
                            : "chat.completion"},
        {"created", std::time(nullptr)},
        {"model", name}};
    engine.Ask(answer);
    Send(response, answer, frame, chat, stream, usage);
  } catch (const BadRequest& bad) {
    Fail(response, bad);
  } catch (const Json::exception& error) {
    Fail(response, {error.what()});
  }

  // Sends an answer, whole or while it is made. If the client is gone, the
  // engine stops.
  void Send(Response& response, std::shared_ptr<Answer> answer,
            const Json& frame, bool chat, bool stream, bool usage) {
    const auto send = [=, this](std::size_t, httplib::DataSink& sink) {
      const auto [text, finish] = engine.Next(*answer, !stream);
      const bool last = !finish.empty();
      std::string out;
      const auto add = [&](const Json& choices, bool with_usage) {
        Json part = frame;
        part["choices"] = choices;
        if (with_usage) part["usage"] = Usage(*answer);
        out += stream ? "data: " + Dump(part) + "\n\n" : Dump(part);
      };
      if (last || !text.empty()) {
        Json choice = {{"index", 0},
                       {"logprobs", nullptr},
                       {"finish_reason", last ? Json(finish) : Json()}};
        const Json message = {{"role", "assistant"}, {"content", text}};
        choice.update(chat ? Json{{stream ? "delta" : "message", message}}
                           : Json{{"text", text}});
        add(Json::array({choice}), last && !stream);
      }
      if (last && stream && usage) add(Json::array(), true);
      if (last && stream) out += "data: [DONE]\n\n";
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

  const Options& options;
  const std::string name;
  const int vocab;
  const Tokenizer& tokenizer;
  Engine& engine;
  std::atomic<std::int64_t> next_id = 1;
};

void Serve(const Options& options, const std::string& host, int port) {
  const auto model =
      LoadModel(options.model, *kvtwin::DTypeFromName(options.weights));
  const auto tokenizer = LoadTokenizer(options.model, model->config.vocab);
  if (options.sessions.context > model->config.context) {
    throw std::runtime_error("the model has a context of " +
                             std::to_string(model->config.context));
  }
  Engine engine(*model, *tokenizer, options);
  Api api{options, fs::path(options.model).filename(), model->config.vocab,
          *tokenizer, engine};

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
       [&engine] { return engine.Metrics(); });
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

}  // namespace

int main(int argc, char** argv) {
  Options options;
  kvtwin::SessionsSpec& sessions = options.sessions;
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
  number("--shift", options.keep, -1, 1 << 20,
         "A full context keeps this many of its first tokens, and drops the "
         "older half of the others; -1: the answer ends instead");
  number("--threads", options.threads, 1, 1024, "Threads that compute");
  app.add_option("--weights", options.weights, "Products of bf16 or f32")
      ->check(CLI::IsMember({"bf16", "f32"}));
  app.add_option("--rows", options.rows, "K and V of f32, f16, bf16 or q8_0")
      ->check(CLI::IsMember({"f32", "f16", "bf16", "q8_0"}));
  app.add_flag("!--no-share", options.share, "Reuse no prefixes");
  app.add_option("--park", options.park, "Folder for conversations on disk");
  number("--parked", options.parked, 1, 1 << 20,
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
