// What a saved sequence must have in common with the cache that loads it: recipe, parameters and shape, as texts.
#pragma once

#include <charconv>
#include <string>
#include <type_traits>
#include <utility>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/logit_rule.hpp"
#include "../../core/model_shape.hpp"
#include "checksum.hpp"

TESSERA_NAMESPACE_BEGIN

/// A fact of a cache: {"parameter window", "32"}.
struct named_fact {
  std::string name, value;
};

namespace detail {

template <class Number>
std::string number_text(Number value) {
  char text[64];
  const auto [end, problem] = std::to_chars(text, text + sizeof(text), value);
  return problem == std::errc{} ? std::string(text, end) : std::string();
}
template <class Value>
std::string value_text(const Value& value) {
  if constexpr (std::is_enum_v<Value>) {
    return number_text(static_cast<long long>(value));
  } else if constexpr (std::is_same_v<Value, bool>) {
    return value ? "1" : "0";
  } else if constexpr (requires { value.adaptive; }) {
    return value.adaptive ? "adaptive" : number_text(static_cast<double>(value.fixed));
  } else {
    return number_text(value);
  }
}
template <class Number>
std::string digest(const Number* values, std::size_t count) {
  return values ? number_text(checksum(values, count * sizeof(Number))) : "none";
}
template <class E>
std::string element_text() {
  using stored = typename E::stored_type;
  if constexpr (std::is_same_v<stored, fp8>)
    return "fp8 of " + element_text<raw_elements<typename E::element_type>>();
  else if constexpr (std::is_same_v<stored, int8>)
    return "int8 of " + element_text<raw_elements<typename E::element_type>>();
  else if constexpr (element_block<stored>)
    return "blocks of " + number_text(stored::elements) + " in " + number_text(sizeof(stored)) + " bytes of " +
           element_text<raw_elements<typename E::element_type>>();
  else
    return std::is_same_v<stored, float> ? "fp32" : std::is_same_v<stored, fp16> ? "fp16" : "bf16";
}

}  // namespace detail

/// The facts of a cache. Memory that the shape points to does not count.
template <class Recipe>
host_vector<named_fact> identity_of(const Recipe& recipe, const model_shape& shape) {
  using layout = typename Recipe::layout_type;
  using detail::number_text;
  host_vector<named_fact> facts;
  const auto add = [&](std::string name, std::string value) { facts.push_back({std::move(name), std::move(value)}); };
  Recipe::policies([&](const char* axis, const std::string& policy) { add(axis, policy); });
  Recipe::parameters(recipe, [&](const char* name, const auto& value, const auto&, const char*) {
    add(std::string("parameter ") + name, detail::value_text(value));
  });
  if constexpr (Recipe::retain_type::chooses || Recipe::retrieve_type::retrieves)
    add("tokens of the budget", number_text(recipe.budget()));
  const logit_rule& rule = recipe.attention.rule;
  add("logit scale", number_text(rule.scale_for(layout::k_dim)));
  add("soft cap", number_text(rule.soft_cap));
  add("window of the logit rule", number_text(rule.sliding_window));
  if constexpr (requires { recipe.retain.budget.shares; }) {
    const auto& shares = recipe.retain.budget.shares;
    add("shares of heads", detail::digest(shares.data, std::size_t(shares.layers) * std::size_t(shares.kv_heads)));
  }
  if constexpr (requires { recipe.retain.budget.gates; }) {
    const auto& gates = recipe.retain.budget.gates;
    add("gates of heads", detail::digest(gates.data, std::size_t(gates.layers) * std::size_t(gates.kv_heads)));
  }
  add("head dims", number_text(layout::k_dim) + " and " + number_text(layout::v_dim));
  add("elements", detail::element_text<typename layout::encoding_type>());
  add("layers", number_text(shape.layers));
  add("q_heads", number_text(shape.q_heads));
  add("kv_heads", number_text(shape.kv_heads));
  std::string sliding;
  for (index_t layer = 0; layer < shape.layers; ++layer) sliding += shape.slides(layer) ? '1' : '0';
  if (!shape.sliding.empty()) add("sliding window", number_text(shape.window) + " in layers " + sliding);
  if (!shape.rope_frequencies.empty())
    add("rope_frequencies", detail::digest(shape.rope_frequencies.data(), shape.rope_frequencies.size()));
  return facts;
}

/// Saves the facts of a cache, or compares those of saved bytes with them.
/// Errors   a fact that differs: tessera::error, which says which.
template <class Archive>
void transfer_identity(const host_vector<named_fact>& facts, Archive& archive) {
  std::uint64_t count = facts.size();
  archive.number(count);
  archive.require(count <= 1024, "of too many facts");
  for (std::uint64_t i = 0; i < count; ++i) {
    if constexpr (Archive::loads) {
      named_fact saved;
      archive.text(saved.name);
      archive.text(saved.value);
      const bool is_known = i < facts.size();
      if (is_known && facts[std::size_t(i)].name == saved.name && facts[std::size_t(i)].value == saved.value) continue;
      if (is_known && facts[std::size_t(i)].name == saved.name)
        fail(saved.name + " of a saved sequence", saved.value,
             facts[std::size_t(i)].value + ", as that of the cache that loads it",
             "load it into a cache of its recipe");
      fail("recipe of a saved sequence", "another: it has '" + saved.name + "', " + saved.value,
           is_known ? "'" + facts[std::size_t(i)].name + "' there" : std::string("fewer facts"),
           "load it into a cache of its recipe");
    } else {
      archive.text(facts[std::size_t(i)].name);
      archive.text(facts[std::size_t(i)].value);
    }
  }
  archive.require(count == facts.size(), "of a recipe with fewer facts");
}

TESSERA_NAMESPACE_END
