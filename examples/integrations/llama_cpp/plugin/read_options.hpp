// What the steps of a program that nobody has changed read: said by environment variables.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>

#include <tessera/core/error.hpp>
#include <tessera/core/parameters.hpp>
#include <tessera/core/types.hpp>

namespace tessera_plugin {

using tessera::index_t;
using tessera::offset_t;

enum class read_method { everything, top_k, quest };

/// TESSERA_READ     everything (nothing is claimed), top_k:CELLS or quest:CELLS, then `:NAME=VALUE,NAME=VALUE`
/// TESSERA_THREADS  of the attention; 1 unless given
/// TESSERA_REPORT   not empty: a line on the standard error stream says what steps have read, when a context ends
struct read_options {
  read_method method = read_method::everything;
  index_t cells = 256;       ///< that a kv_head of a step reads, by row
  index_t page = 16;         ///< `page=`: cells whose keys have common bounds, for quest
  index_t dense_layers = 0;  ///< `dense_layers=`: first layers that read everything
  index_t step_tokens = 8;   ///< `step_tokens=`: a node with more rows is a prompt, and llama.cpp's own
  int threads = 1;
  bool reports = false;

  /// Errors   words that are not settings: tessera::error.
  static read_options of_environment() {
    const auto text = [](const char* name) { return std::string(std::getenv(name) ? std::getenv(name) : ""); };
    read_options result = of(text("TESSERA_READ"));
    if (const std::string threads = text("TESSERA_THREADS"); !threads.empty())
      result.threads = number("TESSERA_THREADS", threads, 1, 1024);
    result.reports = !text("TESSERA_REPORT").empty();
    return result;
  }

  static read_options of(const std::string& text) {
    read_options result;
    const std::size_t first = std::min(text.find(':'), text.size()),
                      second = std::min(text.find(':', first + 1), text.size());
    const std::string name = text.substr(0, first);
    if (name.empty() || name == "everything") {
      tessera::require(first == text.size(), "TESSERA_READ", "'" + text + "'", "everything, without a number",
                       "leave out what follows");
      result.cells = tessera::max_tokens;
      return result;
    }
    tessera::require(name == "top_k" || name == "quest", "TESSERA_READ", "'" + text + "'",
                     "everything, top_k:CELLS or quest:CELLS", "set it to one of them");
    result.method = name == "top_k" ? read_method::top_k : read_method::quest;
    tessera::require(first < text.size(), "cells of TESSERA_READ", "missing", "a number behind the colon",
                     "write " + name + ":256");
    result.cells = number("cells of TESSERA_READ", text.substr(first + 1, second - first - 1), 1, tessera::max_tokens);
    for (std::size_t begin = second + 1; begin < text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      result.set(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return result;
  }

 private:
  static index_t number(const std::string& what, const std::string& text, index_t lowest, index_t highest) {
    index_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    tessera::require(problem == std::errc() && end == text.data() + text.size() && value >= lowest && value <= highest,
                     what, "'" + text + "'", std::to_string(lowest) + " to " + std::to_string(highest),
                     "pass a whole number");
    return value;
  }
  void set(const std::string& setting) {
    const std::size_t equals = std::min(setting.find('='), setting.size());
    const std::string name = setting.substr(0, equals),
                      value = equals < setting.size() ? setting.substr(equals + 1) : "";
    if (name == "page" && method == read_method::quest)
      page = number("page of TESSERA_READ", value, 1, 1024);
    else if (name == "dense_layers")
      dense_layers = number("dense_layers of TESSERA_READ", value, 0, 10000);
    else if (name == "step_tokens")
      step_tokens = number("step_tokens of TESSERA_READ", value, 1, 64);
    else
      tessera::fail("setting of TESSERA_READ", "'" + setting + "'",
                    method == read_method::quest ? "page, dense_layers or step_tokens" : "dense_layers or step_tokens",
                    "write NAME=VALUE, separated by commas");
  }
};

}  // namespace tessera_plugin
