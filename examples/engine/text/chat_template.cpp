#include "chat_template.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <tessera/core/error.hpp>

#include "engine/files/gguf.hpp"
#include "engine/files/input_file.hpp"

namespace engine {
namespace {

constexpr std::string_view begin_mark = "<|im_start|>", end_mark = "<|im_end|>";
constexpr std::string_view header_mark = "<|start_header_id|>", header_end_mark = "<|end_header_id|>",
                           turn_end_mark = "<|eot_id|>";

[[noreturn]] void fail_unknown(const std::string& reason) {
  tessera::fail("chat template of the model", "one that " + reason,
                "ChatML's, as SmolLM2 and Qwen have it, or Llama 3's",
                "pass --template none for plain text, or --template chatml or llama3 to have turns written so");
}
void require_known(bool known, const std::string& reason) {
  if (!known) fail_unknown(reason);
}

// A program's text without comments and with line breaks in place of "\n", so that both ways of writing one are the same.
std::string plainly(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i).starts_with("{#")) {
      const std::size_t end = text.find("#}", i);
      if (end == std::string_view::npos) break;
      i = end + 1;
      continue;
    }
    const bool is_break = text[i] == '\\' && i + 1 < text.size() && text[i + 1] == 'n';
    result += is_break ? '\n' : text[i];
    i += is_break;
  }
  return result;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Repetitions in patterns have an upper bound: the library's matcher goes as deep as they match.
bool begins(std::string_view text, const std::regex& pattern) {
  return std::regex_search(text.begin(), text.end(), pattern, std::regex_constants::match_continuous);
}
bool finds(std::string_view text, const char* pattern) {
  return std::regex_search(text.begin(), text.end(), std::regex(pattern));
}

// What stands behind each occurrence of `mark`.
std::vector<std::string_view> behind_each(std::string_view text, std::string_view mark) {
  std::vector<std::string_view> all;
  for (std::size_t i = text.find(mark); i != std::string_view::npos; i = text.find(mark, i + 1))
    all.push_back(text.substr(i + mark.size()));
  return all;
}

// Errors: a mark such as <|x|> that is not among `known`.
void require_marks(std::string_view text, std::initializer_list<std::string_view> known) {
  for (const std::string_view rest : behind_each(text, "<|")) {
    const std::size_t length = rest.find("|>");
    if (length == std::string_view::npos || length > 40) continue;
    const std::string mark = "<|" + std::string(rest.substr(0, length)) + "|>";
    require_known(std::find(known.begin(), known.end(), mark) != known.end(), "has the mark " + printable(mark));
  }
  for (const char* other : {"[INST]", "<start_of_turn>", "\uff5c", "<|turn>"})
    require_known(!has(text, other), std::string("has the mark ") + other);
}

// Errors: a program that writes something behind `opening`, with which a reply is asked for.
void require_plain_opening(std::string_view text, const std::string& opening) {
  const auto found = behind_each(text, opening);
  require_known(!found.empty(), "does not ask for a reply by " + printable(opening));
  const std::string_view rest = found.back();
  require_known(rest.starts_with('\'') || rest.starts_with('"'), "begins replies with a text");
  const bool writes = has(rest.substr(1), "{{"), asks = has(rest, "enable_thinking is false") && !has(rest, "else");
  require_known(!writes || asks, "begins replies with a text");
}

chat_template recognise_chatml(const std::string& text) {
  require_marks(text, {begin_mark, end_mark, "<|endoftext|>"});
  require_known(!has(text, "strftime_now"), "writes the day's date");
  chat_template found{chat_style::chatml};
  static const std::regex role(
      "(system|user|assistant|tool)(\n|['\"])|"
      "['\"]\\s{0,8}[+~]\\s{0,8}(message\\.role|message\\[['\"]role['\"]\\])\\s{0,8}[+~]\\s{0,8}['\"]\n");
  static const std::regex role_of_call("['\"]\\s{0,8}[+~]\\s{0,8}message\\.role\\s{0,8}\\}\\}");  // of a tool
  const bool calls = has(text, "tool_calls");
  for (const std::string_view rest : behind_each(text, begin_mark))
    require_known(begins(rest, role) || (calls && begins(rest, role_of_call)),
                  "writes something else than a speaker and a line break behind <|im_start|>");
  static const std::regex line_break("\n['\"]|['\"]\\s{0,8}[+~]\\s{0,8}['\"]\n['\"]");
  for (const std::string_view rest : behind_each(text, end_mark))
    require_known(begins(rest, line_break), "writes no line break behind <|im_end|>");
  for (const std::string_view rest : behind_each(text, "<|im_start|>system\n")) {
    if (rest.starts_with('\'') || rest.starts_with('"')) continue;  // a given prompt follows
    const std::string prompt(rest.substr(0, rest.find(end_mark)));
    require_known(!finds(prompt, "[{}\\\\]|['\"]\\s{0,8}[+~}]"), "makes the system's turn of several parts");
    require_known(!found.system_prompt || found.system_prompt == prompt, "has several system prompts");
    found.system_prompt = prompt;
  }
  require_plain_opening(text, "<|im_start|>assistant\n");
  require_known(!has(text, "<think>") || has(text, "loop.index0 > ns.last_query_index"),
                "writes thoughts into replies");
  return found;
}

chat_template recognise_llama3(const std::string& text) {
  require_marks(text, {header_mark, header_end_mark, turn_end_mark, "<|begin_of_text|>", "<|end_of_text|>",
                       "<|eom_id|>", "<|python_tag|>"});
  chat_template found{chat_style::llama3};
  for (const std::string_view rest : behind_each(text, header_end_mark))
    require_known(rest.starts_with("\n\n"), "writes no empty line behind <|end_header_id|>");
  const std::size_t day = text.find("Cutting Knowledge Date: ");
  if (day != std::string::npos) {
    // Its programs write today's date where they are told it. Here it is the one that they have for when they are not.
    std::smatch date;
    const std::string line = text.substr(day, text.find('\n', day) - day);
    const bool is_dated = std::regex_search(text, date, std::regex("set date_string = \"([0-9A-Za-z ]{1,40})\""));
    require_known(is_dated && has(text, "Today Date: \" + date_string + \"\n\n\"") && !finds(line, "[{}'\"]"),
                  "writes dates otherwise than Llama 3.1");
    found.preamble = line + "\nToday Date: " + date[1].str() + "\n\n";
  }
  require_known(!found.preamble.empty() || !has(text, "strftime_now"), "writes the day's date");
  require_plain_opening(text, "<|start_header_id|>assistant<|end_header_id|>\n\n");
  return found;
}

}  // namespace

chat_template recognise_template(std::string_view given) {
  tessera::require(given.size() <= 1 << 20, "bytes of the chat template", given.size(), "at most 2^20",
                   "pass --template none for plain text");
  const std::string text = plainly(given);
  const bool is_chatml = has(text, begin_mark) && has(text, end_mark);
  const bool is_llama3 = has(text, header_mark) && has(text, header_end_mark) && has(text, turn_end_mark);
  require_known(is_chatml != is_llama3, "has other marks");
  require_known(!finds(text, "set\\s{1,8}\\w{0,40}system\\w{0,40}\\s{0,8}=\\s{0,8}(['\"])(?!\\1)"),
                "puts its system prompt in a variable");
  chat_template found = is_chatml ? recognise_chatml(text) : recognise_llama3(text);
  found.begins_with_bos = has(text, "bos_token") || has(text, "<|begin_of_text|>");
  found.trims = finds(text, "content['\"]?\\]?\\s{0,8}\\|\\s{0,8}trim|content['\"]?\\]?\\.strip\\(\\)");
  return found;
}

namespace {

std::optional<std::string> template_in_config(const std::filesystem::path& path) {
  const std::string name = "file " + printable(path.native());
  nlohmann::json config;
  try {
    config = nlohmann::json::parse(read_text_file(path));
  } catch (const nlohmann::json::exception& problem) {
    tessera::fail(name, problem.what(), "a JSON object", "download it again");
  }
  tessera::require(config.is_object(), name, config.type_name(), "a JSON object", "download it again");
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::nullopt;
  if (found->is_string()) return found->get<std::string>();
  if (found->is_array()) {  // one of several, by name
    for (const auto& item : *found) {
      const bool is_default = item.is_object() && item.value("name", nlohmann::json()) == "default";
      if (is_default && item.contains("template") && item["template"].is_string())
        return item["template"].get<std::string>();
    }
  }
  tessera::fail(name + ": chat_template", found->type_name(), "a text, or a list with one of the name \"default\"",
                "pass --template none for plain text");
}

}  // namespace

std::optional<std::string> template_text(const std::filesystem::path& model) {
  if (is_gguf(model)) {
    const gguf_file file = gguf_file::open(model);
    if (!file.value("tokenizer.chat_template")) return std::nullopt;
    return file.text("tokenizer.chat_template");
  }
  if (const auto program = model / "chat_template.jinja"; there(program)) return read_text_file(program);
  if (const auto config = model / "tokenizer_config.json"; there(config)) return template_in_config(config);
  return std::nullopt;
}

// Tokens one behind the other. Text is encoded as a whole between two marks, as the models' own tokenizers do.
class chat::writer {
 public:
  explicit writer(const tokenizer& words) : words_(words) {}
  void add(std::string_view text) { text_ += text; }
  void add(token_t mark) {
    flush();
    tokens_.push_back(mark);
  }
  std::vector<token_t> finish() && {
    flush();
    return std::move(tokens_);
  }

 private:
  void flush() {
    const std::vector<token_t> more = words_.encode(text_);
    tokens_.insert(tokens_.end(), more.begin(), more.end());
    text_.clear();
  }

  const tokenizer& words_;
  std::string text_;
  std::vector<token_t> tokens_;
};

chat::chat(chat_template turns, const tokenizer& words, std::span<const token_t> eos)
    : turns_(std::move(turns)), words_(&words) {
  const bool is_chatml = turns_.style == chat_style::chatml;
  ends_.push_back(mark(is_chatml ? end_mark : turn_end_mark));
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"})
    if (const auto end = words.control(name)) ends_.push_back(*end);
  ends_.insert(ends_.end(), eos.begin(), eos.end());
  for (const std::string_view name : {is_chatml ? begin_mark : header_mark, is_chatml ? end_mark : header_end_mark})
    (void)mark(name);
  if (turns_.begins_with_bos)
    tessera::require(words.bos() || words.control("<|begin_of_text|>"), "token that begins a text", "missing",
                     "one, as the model's chat template begins with it", "take tokenizer and template from one model");
}

token_t chat::mark(std::string_view name) const {
  const auto found = words_->control(name);
  tessera::require(found.has_value(), "control token " + std::string(name), "missing in the model's vocabulary",
                   "one of that name, which the chat template writes",
                   "take tokenizer and template from one model, or pass --template none");
  return *found;
}

void chat::write_turn(writer& to, std::string_view speaker, std::string_view message) const {
  if (turns_.style == chat_style::chatml) {
    to.add(mark(begin_mark));
    to.add(std::string(speaker) + "\n");
    to.add(message);
    to.add(mark(end_mark));
    to.add("\n");
  } else {
    to.add(mark(header_mark));
    to.add(speaker);
    to.add(mark(header_end_mark));
    to.add("\n\n");
    to.add(message);
    to.add(mark(turn_end_mark));
  }
}

namespace {

std::string_view without_white_space_around(std::string_view text) {
  constexpr std::string_view space = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(space);
  return first == std::string_view::npos ? text.substr(0, 0)
                                         : text.substr(first, text.find_last_not_of(space) + 1 - first);
}

}  // namespace

// A person's turn, and the opening of the reply.
void chat::write_person(writer& to, std::string_view message) const {
  write_turn(to, "user", turns_.trims ? without_white_space_around(message) : message);
  if (turns_.style == chat_style::chatml) {
    to.add(mark(begin_mark));
    to.add("assistant\n");
  } else {
    to.add(mark(header_mark));
    to.add("assistant");
    to.add(mark(header_end_mark));
    to.add("\n\n");
  }
}

std::vector<token_t> chat::first_turn(const std::optional<std::string>& system_prompt, std::string_view message) const {
  writer to(*words_);
  if (turns_.begins_with_bos) to.add(words_->bos() ? *words_->bos() : *words_->control("<|begin_of_text|>"));
  const std::optional<std::string>& chosen = system_prompt ? system_prompt : turns_.system_prompt;
  if (chosen || !turns_.preamble.empty()) {
    const std::string_view own = chosen ? std::string_view(*chosen) : std::string_view();
    write_turn(to, "system", turns_.preamble + std::string(turns_.trims ? without_white_space_around(own) : own));
  }
  write_person(to, message);
  return std::move(to).finish();
}

std::vector<token_t> chat::next_turn(std::span<const token_t> reply, std::string_view message) const {
  writer to(*words_);
  // A reply that was cut off ends here; one that ended by another token than the template's ends as the template says.
  const bool is_ended = !reply.empty() && std::find(ends_.begin(), ends_.end(), reply.back()) != ends_.end();
  if (!reply.empty() && !is_ended) to.add(reply.back());
  to.add(ends_.front());
  if (turns_.style == chat_style::chatml) to.add("\n");
  write_person(to, message);
  return std::move(to).finish();
}

}  // namespace engine
