// How K and V are stored: settings that every method has.
#pragma once

#include <string>
#include <vector>

#include "tool/methods/method_cache.hpp"

namespace tool {

/// How rows are stored, and whether a Hadamard matrix mixes their channels before.
struct row_settings {
  std::string rows = "given";  ///< one of `row_formats`
  bool rotates = false;
  index_t whole_tail = 0;  ///< newest tokens that stay whole, of fp8 and int4 rows

  /// Takes those settings out of `given`. Errors: a word that is none of those; a format that this build lacks.
  static row_settings taken_from(std::vector<setting>& given);
  /// As a method's other parameters are shown.
  std::vector<parameter_info> shown() const;

  /// Whether rows are what the model gives, so that all methods attend to the same while nothing is dropped.
  bool as_given() const { return rows == "given" && !rotates; }
  /// The element type of the cache: a format's rows come in `given`, and bf16 rows are rounded to it.
  element_type element(element_type given) const { return rows == "bf16" ? element_type::bf16 : given; }
  /// Whether rows are of a format of few bits.
  bool encodes() const { return rows != "given" && rows != "bf16"; }
  /// The same request in the parameters of tailed_rows.
  cache_request tailed(const cache_request& request) const;
};

/// The formats that this build stores rows in, and whether it has those with a whole tail.
std::vector<std::string> row_formats();
bool has_whole_tails();

/// Rows [tokens, heads, dim] of which a copy is rotated, where rows are; else as they come.
class row_rotation {
 public:
  explicit row_rotation(bool rotates = false) : rotates_(rotates) {}

  /// Rows of `dim` elements. Valid until the next call.
  input_rows rotated(const input_rows& rows, index_t dim);
  /// `count` rows [dim], back, in place.
  void restore(float* rows, offset_t count, index_t dim) const;

 private:
  bool rotates_;
  std::vector<float> rows_;
};

}  // namespace tool
