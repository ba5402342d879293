// Chat templates: which are recognised, and the tokens of turns.
#include <span>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/text/chat_template.hpp"
#include "examples/temporary_folder.hpp"
#include "gguf_bytes.hpp"

using namespace engine_tests;
using engine::chat_style;
using engine::recognise_template;
using engine::token_t;

namespace {

const std::string opening = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const std::string default_prompt =
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}";

std::string chatml(const std::string& first = "", const std::string& content = "message['content']",
                   const std::string& last = opening) {
  return "{% for message in messages %}" + first + "{{'<|im_start|>' + message['role'] + '\n' + " + content +
         " + '<|im_end|>' + '\n'}}{% endfor %}" + last;
}
std::string llama3(const std::string& before = "") {
  return "{{- bos_token }}" + before +
         "{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ "
         "message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}"
         "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}";
}
const std::string dated =
    "{%- if not date_string is defined %}{%- set date_string = \"26 Jul 2024\" %}{%- endif %}"
    "{{- \"<|start_header_id|>system<|end_header_id|>\\n\\n\" }}{{- \"Cutting Knowledge Date: December 2023\\n\" }}"
    "{{- \"Today Date: \" + date_string + \"\\n\\n\" }}{{- system_message }}{{- \"<|eot_id|>\" }}";

void refused(const std::string& text, const std::string& reason) {
  INFO(text);
  CHECK_THROWS_WITH(recognise_template(text),
                    contains("chat template of the model is one that " + reason) && contains("ChatML's"));
}

/// A tokenizer of single bytes: token b is the byte b, the marks stand behind.
const std::vector<std::string> marks{"<|im_start|>", "<|im_end|>",        "<|start_header_id|>", "<|end_header_id|>",
                                     "<|eot_id|>",   "<|begin_of_text|>", "<|endoftext|>"};
struct words {
  explicit words(const std::vector<std::string>& controls = marks) : tokenizer(load(controls)) {}
  engine::tokenizer load(const std::vector<std::string>& controls) {
    gguf_bytes file;
    put_tokenizer(file, {}, "gpt-2", controls);
    folder.write("m.gguf", file.bytes());
    return engine::tokenizer::of_model(folder / "m.gguf");
  }
  /// Texts and marks, joined.
  std::vector<token_t> joined(const std::vector<std::string>& parts) const {
    std::vector<token_t> all;
    for (const std::string& part : parts) {
      const auto mark = tokenizer.control(part);
      const std::vector<token_t> tokens = mark ? std::vector<token_t>{*mark} : tokenizer.encode(part);
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
    return all;
  }
  temporary_folder folder;
  engine::tokenizer tokenizer;
};

}  // namespace

TEST_CASE("templates that write ChatML or Llama 3's turns are recognised, whichever way they are spelt") {
  auto plain = recognise_template(chatml());
  CHECK((plain.style == chat_style::chatml && !plain.system_prompt && !plain.trims && !plain.begins_with_bos));
  CHECK(recognise_template(chatml(default_prompt)).system_prompt == "Be kind");
  CHECK(recognise_template(chatml("", "message['content'] | trim")).trims);
  CHECK(recognise_template("{{ bos_token }}" + chatml()).begins_with_bos);
  const std::string escaped =
      "{%- if loop.index0 > ns.last_query_index %}{%- endif %}{%- if messages[0].role == 'system' %}{{- "
      "'<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
      "{%- else %}{{- \"<|im_start|>system\\nIt's kind<|im_end|>\\n\" }}{%- endif %}{%- for message in messages %}"
      "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
      "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
      "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif "
      "%}"
      "{%- endif %}";
  CHECK(recognise_template(escaped).system_prompt == "It's kind");
  auto third = recognise_template(llama3());
  CHECK((third.style == chat_style::llama3 && third.begins_with_bos && third.trims && third.preamble.empty()));
  CHECK(recognise_template(llama3(dated)).preamble ==
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
}

TEST_CASE("templates that write something else are refused, and say what") {
  refused("[INST] {{ message }} [/INST]", "has other marks");
  refused(chatml() + llama3(), "has other marks");
  refused(chatml("<|im_sep|>"), "has the mark <|im_sep|>");
  refused(chatml("{{ strftime_now('%d') }}"), "writes the day's date");
  refused(llama3("{{ strftime_now('%d') }}"), "writes the day's date");
  refused(chatml(default_prompt + "{{ '<|im_start|>system\nBe cold<|im_end|>\n' }}"), "has several system prompts");
  refused(chatml("{{ '<|im_start|>system\nBe ' + mood + '<|im_end|>\n' }}"),
          "makes the system's turn of several parts");
  refused(chatml("{% set system_message = 'You are kind' %}"), "puts its system prompt in a variable");
  refused(chatml("", "message['content']", "{{ '<|im_start|>assistant\n<think>\n' }}"), "begins replies with a text");
  refused(chatml("", "message['content']", opening + "{{ '<think>' }}"), "begins replies with a text");
  refused(chatml("", "message['content']", ""), "does not ask for a reply");
  refused(chatml("{{ '<|im_start|>' + name + '\n' }}"), "writes something else than a speaker");
  refused(chatml("{{ 'x<|im_end|>' }}"), "writes no line break behind <|im_end|>");
  refused(chatml("{{ '<|im_start|>' + message.role }}"), "writes something else than a speaker");
  CHECK_NOTHROW(
      recognise_template(chatml("{% if message.tool_calls %}{{ '<|im_start|>' + message.role }}{% endif %}")));
  refused(chatml("", "'<think>' + message['content']", "{# loop.index0 > ns.last_query_index #}" + opening),
          "writes thoughts into replies");
  refused(llama3("Cutting Knowledge Date: {{ date }}\n"), "writes dates otherwise");
  CHECK_THROWS_WITH(recognise_template(chatml(std::string(2 << 20, ' '))), contains("at most 2^20"));
  CHECK_THROWS_AS(recognise_template(chatml("{% set system" + std::string(1 << 19, ' ') + "= 'x' %}", "x",
                                            std::string(1 << 18, '<') + "|")),
                  tessera::error);
}

TEST_CASE("turns are marks and text, and a person's text is never a mark") {
  const words w;
  const engine::chat chat(recognise_template(chatml(default_prompt)), w.tokenizer, {});
  CHECK(chat.first_turn({}, "Hi <|im_end|>") ==
        w.joined({"<|im_start|>", "system\nBe kind", "<|im_end|>", "\n", "<|im_start|>", "user\nHi <|im", "_end|>",
                  "<|im_end|>", "\n", "<|im_start|>", "assistant\n"}));
  CHECK(chat.first_turn("", "Hi") == w.joined({"<|im_start|>", "system\n", "<|im_end|>", "\n", "<|im_start|>",
                                               "user\nHi", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"}));
  const std::vector<std::string> more{"<|im_end|>", "\n", "<|im_start|>", "user\n?",
                                      "<|im_end|>", "\n", "<|im_start|>", "assistant\n"};
  const auto next = w.joined(more);
  CHECK(chat.next_turn(w.joined({"Yes", "<|im_end|>"}), "?") == next);
  CHECK(chat.next_turn(w.joined({"Yes", "<|endoftext|>"}), "?") == next);
  auto cut_off = next;
  cut_off.insert(cut_off.begin(), token_t('s'));
  CHECK(chat.next_turn(w.joined({"Yes"}), "?") == cut_off);
  CHECK(chat.ends().front() == w.tokenizer.control("<|im_end|>"));

  const engine::chat third(recognise_template(llama3(dated)), w.tokenizer, std::vector<token_t>{65});
  CHECK(third.first_turn(" Short. ", " Hi\n") ==
        w.joined({"<|begin_of_text|>", "<|start_header_id|>", "system", "<|end_header_id|>",
                  "\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nShort.", "<|eot_id|>",
                  "<|start_header_id|>", "user", "<|end_header_id|>", "\n\nHi", "<|eot_id|>", "<|start_header_id|>",
                  "assistant", "<|end_header_id|>", "\n\n"}));
  CHECK(third.next_turn(w.joined({"Yes", "<|eot_id|>"}), "?") ==
        w.joined({"<|eot_id|>", "<|start_header_id|>", "user", "<|end_header_id|>", "\n\n?", "<|eot_id|>",
                  "<|start_header_id|>", "assistant", "<|end_header_id|>", "\n\n"}));
  CHECK(third.ends().back() == 65);

  const words poor({"<|im_start|>"});
  CHECK_THROWS_WITH(engine::chat(recognise_template(chatml()), poor.tokenizer, {}),
                    contains("control token <|im_end|> is missing"));
}

TEST_CASE("a model's template is found where its files have it") {
  const temporary_folder folder;
  CHECK(!engine::template_text(folder.path()));
  folder.write("tokenizer_config.json", R"({"chat_template": null})");
  CHECK(!engine::template_text(folder.path()));
  folder.write("tokenizer_config.json", R"({"chat_template": "a"})");
  CHECK(engine::template_text(folder.path()) == "a");
  folder.write("tokenizer_config.json",
               R"({"chat_template": [{"name": "rag", "template": "b"}, {"name": "default", "template": "c"}]})");
  CHECK(engine::template_text(folder.path()) == "c");
  for (const char* wrong : {R"({"chat_template": [1, {"name": "rag"}]})", R"({"chat_template": 3})", "[]", "{"}) {
    folder.write("tokenizer_config.json", wrong);
    CHECK_THROWS_WITH(engine::template_text(folder.path()), contains("tokenizer_config.json"));
  }
  folder.write("chat_template.jinja", "d");
  CHECK(engine::template_text(folder.path()) == "d");
  gguf_bytes file;
  folder.write("m.gguf", file.bytes());
  CHECK(!engine::template_text(folder / "m.gguf"));
  file.text("tokenizer.chat_template", "e");
  folder.write("m.gguf", file.bytes());
  CHECK(engine::template_text(folder / "m.gguf") == "e");
}
