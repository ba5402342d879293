// Random conversations as data: what is asked of both caches, in the order in which it is.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "backend/cuda/device.hpp"
#include "support/shrink/must.hpp"
#include "tessera/core/model_shape.hpp"

namespace gpu_test {

enum class conversation_verb { open, close, fork, prompt, step };

struct conversation_call {
  conversation_verb verb = conversation_verb::open;
  index_t id = 0;                 ///< of close, fork and prompt
  index_t tokens = 0;             ///< of a step, which is of all sequences
  std::vector<index_t> chunks{};  ///< of a prompt
  bool reserves = false, announces = false, ends_layers = false;
  unsigned seed = 0;  ///< of the rows
};

/// A call as the initializer of a conversation_call.
struct conversation_code {
  std::string operator()(const conversation_call& call) const {
    static constexpr const char* names[] = {"open", "close", "fork", "prompt", "step"};
    std::ostringstream text;
    text << "{.verb = conversation_verb::" << names[int(call.verb)];
    if (call.verb != conversation_verb::open && call.verb != conversation_verb::step) text << ", .id = " << call.id;
    if (call.verb == conversation_verb::step) text << ", .tokens = " << call.tokens;
    if (!call.chunks.empty()) text << ", .chunks = " << support::listed(call.chunks);
    if (call.reserves) text << ", .reserves = true";
    if (call.announces) text << ", .announces = true";
    if (call.ends_layers) text << ", .ends_layers = true";
    if (call.verb == conversation_verb::prompt || call.verb == conversation_verb::step)
      text << ", .seed = " << call.seed << "u";
    text << "},";
    return text.str();
  }
};

/// Shorter prompts in fewer chunks, and smaller steps.
struct simpler_conversations {
  using list = std::vector<conversation_call>;

  std::vector<list> operator()(const list& calls, std::size_t index) const {
    std::vector<list> lists;
    const auto with = [&](const auto& change) {
      lists.push_back(calls);
      change(lists.back()[index]);
    };
    const conversation_call& call = calls[index];
    for (std::size_t i = 0; i < call.chunks.size(); ++i) {
      if (call.chunks.size() > 1)
        with([&](conversation_call& changed) { changed.chunks.erase(changed.chunks.begin() + std::ptrdiff_t(i)); });
      for (const index_t tokens : fewer(call.chunks[i]))
        with([&](conversation_call& changed) { changed.chunks[i] = tokens; });
    }
    for (std::size_t i = 1; i < call.chunks.size(); ++i) {
      with([&](conversation_call& changed) {
        changed.chunks[i - 1] += changed.chunks[i];
        changed.chunks.erase(changed.chunks.begin() + std::ptrdiff_t(i));
      });
    }
    for (const index_t tokens : fewer(call.tokens)) with([&](conversation_call& changed) { changed.tokens = tokens; });
    if (call.reserves) with([](conversation_call& changed) { changed.reserves = false; });
    if (call.announces) with([](conversation_call& changed) { changed.announces = false; });
    if (call.ends_layers) with([](conversation_call& changed) { changed.ends_layers = false; });
    return lists;
  }

 private:
  static std::vector<index_t> fewer(index_t tokens) {
    std::vector<index_t> counts;
    for (const index_t count : {1, tokens / 2, tokens - 1}) {
      if (count >= 1 && count < tokens && std::count(counts.begin(), counts.end(), count) == 0) counts.push_back(count);
    }
    return counts;
  }
};

inline model_shape random_conversation_shape() {
  const index_t layers = draw(1, shrunk(3, 1)), kv_heads = draw(1, shrunk(4, 2));
  return {layers, kv_heads * draw(1, shrunk(8, 4)), kv_heads};
}

/// Draws a conversation. Below TESSERA_TEST_SCALE 1 shapes and conversations are smaller too: racecheck takes seconds for each launch
/// of a cluster of blocks (H200, CUDA 13.0), and of those a step has one a layer.
class conversation_drawing {
 public:
  conversation_drawing(bool may_announce, bool may_end_layers)
      : may_announce_(may_announce), may_end_layers_(may_end_layers) {}

  std::vector<conversation_call> draw_all() {
    const index_t opened = draw(1, 3);
    for (index_t id = 0; id < opened; ++id) add(conversation_verb::open, id), ids_.push_back(id);
    if (opened == 3 && draw(0, 1)) close(1);  // a hole: ids do not follow one another
    for (index_t turn = 0, turns = draw(1, shrunk(3, 2)); turn < turns; ++turn) {
      for (const index_t id : ids_) prompt(id);
      steps(draw(0, shrunk(6, 2)));
      if (ids_.size() < 3 && draw(0, 2) == 0) fork();
    }
    return std::move(calls_);
  }

 private:
  conversation_call& add(conversation_verb verb, index_t id) {
    conversation_call& call = calls_.emplace_back();
    call.verb = verb;
    call.id = id;
    call.seed = unsigned(rng()());
    return call;
  }
  void close(index_t id) {
    add(conversation_verb::close, id);
    std::erase(ids_, id);
  }
  void steps(index_t count) {
    for (index_t i = 0; i < count; ++i) add(conversation_verb::step, 0).tokens = draw(0, 2) ? 1 : draw(2, 8);
  }
  /// One sequence becomes two; at times the older one is closed then.
  void fork() {
    const index_t id = ids_[std::size_t(draw(0, int(ids_.size()) - 1))];
    add(conversation_verb::fork, id);
    index_t forked = 0;  // the lowest id that is free
    while (std::count(ids_.begin(), ids_.end(), forked) > 0) ++forked;
    ids_.push_back(forked);
    steps(draw(0, 2));
    if (!draw(0, 1)) close(id);
  }
  void prompt(index_t id) {
    conversation_call& call = add(conversation_verb::prompt, id);
    const index_t total = draw(1, shrunk(220, 150));
    call.reserves = draw(0, 1) == 1;
    call.announces = may_announce_ && draw(0, 1) == 1;
    call.ends_layers = may_end_layers_ && draw(0, 1) == 1;
    for (index_t done = 0; done < total; done += call.chunks.back())
      call.chunks.push_back(std::min(total - done, draw(1, 130)));
  }

  bool may_announce_, may_end_layers_;
  std::vector<index_t> ids_;
  std::vector<conversation_call> calls_;
};

inline std::vector<conversation_call> random_conversation(bool may_announce, bool may_end_layers) {
  return conversation_drawing(may_announce, may_end_layers).draw_all();
}

}  // namespace gpu_test
