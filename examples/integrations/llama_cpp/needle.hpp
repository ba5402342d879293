// Documents with one secret word in them, whose sentence is begun once more at the end: what a small model can answer.
#pragma once

#include <algorithm>
#include <cctype>
#include <random>
#include <string>
#include <vector>

#include "model.hpp"

namespace tessera_llama {

struct needle_document {
  std::vector<llama_token> tokens;  ///< the document, and the sentence begun once more
  std::string word;                 ///< that goes on
};

/// About `length` tokens of everyday sentences, the secret at `depth` (0 to 1) of them. The same seed gives the same document.
inline needle_document make_needle(const loaded_model& model, int length, double depth, unsigned seed) {
  std::mt19937 bits(seed);
  const auto any = [&](std::initializer_list<const char*> words) {
    return std::string(words.begin()[bits() % words.size()]);
  };
  const auto who = [&] {
    return any({"The miller", "A student", "The ferryman", "My aunt", "The carpenter", "An old painter", "The clerk",
                "A cook"});
  };
  const auto what = [&] {
    return any({"a basket of pears", "the evening paper", "two chairs", "a broken clock", "the blue door",
                "some warm bread", "a ladder", "the mail"});
  };
  const auto where = [&] {
    return any({"by the canal", "behind the school", "at the fair", "near the tower", "on the pier", "in the yard",
                "across the bridge"});
  };
  const auto when = [&] {
    return any({"on Friday", "before dawn", "after lunch", "last autumn", "in the evening", "during the storm"});
  };
  const auto sentence = [&]() -> std::string {
    switch (bits() % 5) {
      case 0:
        return who() + " carried " + what() + " " + where() + " " + when() + ". ";
      case 1:
        return "It rained " + when() + ", and " + who() + " waited " + where() + ". ";
      case 2:
        return "There were " + std::to_string(2 + bits() % 80) + " people " + where() + " " + when() + ". ";
      case 3:
        return who() + " sold " + what() + " for " + std::to_string(3 + bits() % 70) + " coins. ";
      default:
        return "Nobody saw " + what() + " that stood " + where() + ". ";
    }
  };
  const std::string subject =
      any({"amber", "silver", "crimson", "ivory"}) + " " + any({"falcon", "badger", "otter", "heron"});
  const std::string word =
      any({"velvet", "copper", "marble", "paper"}) + " " + any({"walnut", "lantern", "window", "anchor"});
  std::vector<std::string> sentences;
  for (int held = 40; held < length;) {
    sentences.push_back(sentence());
    held += int(model.tokens(sentences.back()).size());
  }
  sentences.insert(sentences.begin() + long(depth * double(sentences.size())),
                   "The secret word of the " + subject + " is " + word + ". ");
  std::string text;
  for (const std::string& one : sentences) text += one;
  return {model.tokens(text + "\n\nThe secret word of the " + subject + " is"), word};
}

inline bool is_right(std::string said, const std::string& word) {
  std::transform(said.begin(), said.end(), said.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return said.find(word) != std::string::npos;
}

}  // namespace tessera_llama
