// Calls of a cache as lines of C++, and simpler calls in place of changed.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>

#include "cache_call.hpp"
#include "support/shrink/must.hpp"

namespace support {

/// Prints calls of a `std::unique_ptr<called_cache> cache`, and what the lines need.
class call_code {
 public:
  explicit call_code(bool on_device) : inputs_(call_inputs(on_device).data()), on_device_(on_device) {}

  std::string beginning() const {
    return "  const float* inputs = support::call_inputs(" + std::string(on_device_ ? "true" : "false") +
           ").data();\n  std::vector<float> out(1 << 16), lse(1 << 12);\n";
  }

  std::string operator()(const cache_call& call) const {
    std::ostringstream text;
    if (call.fault != called_cache::boundary_fault::none)
      text << "cache->fault = called_cache::boundary_fault(" << int(call.fault) << ");  ";
    const std::string step = step_of(call, text);
    switch (call.verb) {
      case cache_verb::open:
        text << "cache->open(" << options(call.options) << ");";
        break;
      case cache_verb::fork:
        text << (call.first != fork_kind::plain ? "cache->fork_by_bytes(" : "cache->fork(") << call.id << ");";
        break;
      case cache_verb::truncate:
        text << "cache->truncate(" << call.id << ", " << call.first << ");";
        break;
      case cache_verb::detour:
        text << "// of " << listed(call.ids) << ", taken back: " << call.first << " steps (or see detour_kind), "
             << call.tokens << " layers, with " << rows(call.q) << ", " << rows(call.k) << ", " << rows(call.v);
        break;
      case cache_verb::draft:
        text << "// a draft of " << listed(call.ids) << " by parents " << listed(call.parents) << ", accepted:";
        for (const auto& nodes : call.nodes) text << " " << listed(nodes);
        text << ", with " << rows(call.q) << ", " << rows(call.k) << ", " << rows(call.v);
        break;
      case cache_verb::close:
        text << "cache->close(" << call.id << ");";
        break;
      case cache_verb::reserve:
        text << "cache->reserve(" << call.id << ", " << call.tokens << ");";
        break;
      case cache_verb::prefill:
        text << "cache->prefill(" << call.layer << ", " << call.id << ", " << rows(call.q) << ", " << rows(call.k)
             << ", " << rows(call.v) << ");";
        break;
      case cache_verb::prefill_attention:
        text << "cache->prefill_attention(" << call.layer << ", " << call.id << ", " << rows(call.q) << results(call)
             << ");";
        break;
      case cache_verb::end_layer:
        text << "cache->end_layer(" << call.layer << ", " << call.id << ");";
        break;
      case cache_verb::end_prefill:
        text << "cache->end_prefill(" << call.id << ");";
        break;
      case cache_verb::announce:
        text << "cache->announce(" << call.id << ", " << call.tokens << ");";
        break;
      case cache_verb::reread:
        text << "cache->reread(" << call.layer << ", " << call.id << ", " << call.first << ", " << call.tokens << ", "
             << rows(call.q) << ", " << rows(call.k) << ", " << rows(call.v) << ", "
             << result("out.data()", call.wanted.out) << ");";
        break;
      case cache_verb::prepare_step:
        text << "const batch step" << call.step << " = cache->prepare_" << (call.lengths.empty() ? "step(" : "uneven(")
             << listed(call.ids) << ", " << (call.lengths.empty() ? std::to_string(call.tokens) : listed(call.lengths))
             << ");";
        break;
      case cache_verb::begin_step:
        text << "cache->begin_step(" << step << ");";
        break;
      case cache_verb::decode:
        text << "cache->decode(" << call.layer << ", " << step << ", " << rows(call.q) << ", " << rows(call.k) << ", "
             << rows(call.v) << results(call) << ");";
        break;
      case cache_verb::set_budget:
        text << "cache->set_budget(" << call.tokens << ");";
        break;
      case cache_verb::copy:
        text << "cache = cache->copy();";
        break;
      case cache_verb::look:
        text << "cache->positions(" << call.layer << ", " << call.id << ", " << call.head << "), cache->readable("
             << call.layer << ", " << call.id << ", " << call.head << ");";
    }
    if (!step.empty() && call.is_altered) text << " }";
    if (call.is_wrong) text << "  // must be refused";
    return text.str();
  }

 private:
  static std::string budget(const tessera::token_budget& given) {
    std::ostringstream text;
    text.precision(17);
    text << "{" << given.tokens << ", " << given.share << "}";
    return text.str();
  }
  static std::string options(const tessera::sequence_options& given) {
    return given.is_given() ? "{" + budget(given.budget) + ", " + budget(given.read_tokens) + "}" : "";
  }
  static std::string step_of(const cache_call& call, std::ostringstream& text) {
    if (call.verb != cache_verb::begin_step && call.verb != cache_verb::decode) return {};
    const std::string step = call.step > 0 ? "step" + std::to_string(call.step) : "batch{}";
    if (!call.is_altered) return step;
    text << "{ batch other = " << step << "; other.ids = " << listed(call.ids) << "; other.tokens = " << call.tokens
         << "; ";
    return "other";
  }
  template <class Rows>
  static std::string shape(const std::string& data, const Rows& rows) {
    std::ostringstream text;
    const auto plain = tessera::nhd_rows(rows.data, rows.tokens, rows.heads, rows.dim, rows.sequences);
    if (plain.sequence_stride != rows.sequence_stride || plain.token_stride != rows.token_stride ||
        plain.head_stride != rows.head_stride) {  // one number alone is wrong
      text << "{" << data << ", " << rows.sequence_stride << ", " << rows.token_stride << ", " << rows.head_stride
           << ", " << rows.sequences << ", " << rows.tokens << ", " << rows.heads << ", " << rows.dim << "}";
    } else {
      text << "nhd_rows(" << data << ", " << rows.tokens << ", " << rows.heads << ", " << rows.dim;
      if (rows.sequences != 1) text << ", " << rows.sequences;
      text << ")";
    }
    return text.str();
  }
  std::string rows(const called_cache::rows& given) const {
    if (!given.data) return shape("static_cast<const float*>(nullptr)", given);
    return shape("inputs + " + std::to_string(given.data - inputs_), given);
  }
  static std::string result(const char* target, const called_cache::results& wanted) {
    return wanted.data ? shape(target, wanted) : "{}";
  }
  static std::string results(const cache_call& call) {
    return ", " + result("out.data()", call.wanted.out) + ", " + result("lse.data()", call.wanted.lse);
  }

  const float* inputs_;
  bool on_device_;
};

/// Lists with a simpler call in place of one: lower ids, fewer tokens and sequences, rows that begin where all inputs
/// do.
class simpler_calls {
 public:
  using list = std::vector<cache_call>;

  explicit simpler_calls(bool on_device) : inputs_(call_inputs(on_device).data()) {}

  std::vector<list> operator()(const list& calls, std::size_t index) const {
    std::vector<list> lists;
    const cache_call& call = calls[index];
    if (call.is_wrong || call.is_altered) return lists;
    const auto with = [&](const auto& change) {
      lists.push_back(calls);
      change(lists.back()[index]);
    };
    for (index_t id = 0; id < std::min(call.id, 10); ++id) with([&](cache_call& changed) { changed.id = id; });
    switch (call.verb) {
      case cache_verb::open:
        if (call.options.is_given()) with([](cache_call& changed) { changed.options = {}; });
        break;
      case cache_verb::prefill:
        lists.push_back(without_prompts(calls, call.id));
        for (const index_t tokens : fewer(call.k.tokens, 1))
          with([&](cache_call& changed) { shorten(changed, tokens); });
        break;
      case cache_verb::prepare_step:
        if (!call.lengths.empty()) lists.push_back(with_step(calls, index, call.ids, call.tokens));
        for (const index_t tokens : fewer(call.tokens, 1)) lists.push_back(with_step(calls, index, call.ids, tokens));
        for (std::size_t i = 0; i < call.ids.size(); ++i) {
          for (index_t id = 0; id < std::min(call.ids[i], 10); ++id) {
            auto ids = call.ids;
            ids[i] = id;
            if (std::count(ids.begin(), ids.end(), id) == 1) lists.push_back(with_step(calls, index, ids, call.tokens));
          }
        }
        for (std::size_t i = 0; call.ids.size() > 1 && i < call.ids.size(); ++i) {
          auto ids = call.ids;
          ids.erase(ids.begin() + std::ptrdiff_t(i));
          lists.push_back(with_step(calls, index, ids, call.tokens));
        }
        break;
      case cache_verb::reserve:
      case cache_verb::announce:
      case cache_verb::reread:
        for (const index_t tokens : fewer(call.tokens, 1)) with([&](cache_call& changed) { changed.tokens = tokens; });
        break;
      default:
        break;
    }
    const bool is_plain = (!call.q.data || call.q.data == inputs_) && (!call.k.data || call.k.data == inputs_);
    if (!is_plain) {
      with([&](cache_call& changed) {
        for (auto* rows : {&changed.q, &changed.k, &changed.v}) rows->data = rows->data ? inputs_ : nullptr;
      });
    }
    return lists;
  }

 private:
  static std::vector<index_t> fewer(index_t tokens, index_t least) {
    std::vector<index_t> counts;
    for (const index_t count : {least, tokens / 2, tokens - 1}) {
      if (count >= least && count < tokens && std::count(counts.begin(), counts.end(), count) == 0)
        counts.push_back(count);
    }
    return counts;
  }
  template <class Rows>
  static void resize(Rows& rows, index_t sequences, index_t tokens) {
    if (rows.data) rows = tessera::nhd_rows(rows.data, tokens, rows.heads, rows.dim, sequences);
  }
  static void shorten(cache_call& call, index_t tokens) {
    resize(call.q, 1, std::min(tokens, call.q.tokens));
    resize(call.k, 1, tokens);
    resize(call.v, 1, tokens);
  }
  /// Without the prompts of a sequence, whose layers must come to the same end.
  static list without_prompts(const list& calls, index_t id) {
    list left;
    for (const cache_call& call : calls) {
      const bool is_of_prompt = call.verb == cache_verb::prefill || call.verb == cache_verb::prefill_attention ||
                                call.verb == cache_verb::end_layer || call.verb == cache_verb::end_prefill;
      if (!is_of_prompt || call.id != id) left.push_back(call);
    }
    return left;
  }
  /// A step, and all layers that decode it.
  static list with_step(const list& calls, std::size_t index, const std::vector<index_t>& ids, index_t tokens) {
    list changed = calls;
    changed[index].ids = ids;
    changed[index].tokens = tokens;
    changed[index].lengths.clear();
    const auto sequences = index_t(ids.size());
    for (cache_call& call : changed) {
      const bool is_right = !call.is_wrong && !call.is_altered && call.q.tokens == calls[index].tokens &&
                            call.k.tokens == calls[index].tokens &&
                            call.q.sequences == index_t(calls[index].ids.size());
      if (call.verb != cache_verb::decode || call.step != calls[index].step || !is_right) continue;
      for (auto* rows : {&call.q, &call.k, &call.v}) resize(*rows, sequences, tokens);
      resize(call.wanted.out, sequences, tokens);
      resize(call.wanted.lse, sequences, tokens);
      call.wanted.tokens = tokens;
      call.wanted.sequences = sequences;
    }
    return changed;
  }

  const float* inputs_;
};

}  // namespace support
