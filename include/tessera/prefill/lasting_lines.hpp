// LoopServe's lines, which decode steps may read too.
#pragma once

#include "covering_lines.hpp"

TESSERA_NAMESPACE_BEGIN

/// What of a prompt's lines decoding reads.
enum class read_lines { off, vertical };

/// As `covering_lines`; with `lines` vertical the columns of all turns' prompts, of all query heads that share a list,
/// join what the first stage lets a turn's steps read. They come on top of its budget.
/// Errors   as `covering_lines`.   Cost  as `covering_lines`; a bit a token and query head of columns that are
///          remembered.
/// Paper    LoopServe, arXiv:2507.13681, Algorithm 4. Differs: slash lines are distances and say nothing of later rows.
struct lasting_lines : covering_lines {
  static constexpr const char* name = "lasting_lines";

  read_lines lines = read_lines::off;

  bool adds_to_reading() const { return lines == read_lines::vertical; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    covering_lines::parameters(self, visit);
    visit("lines", self.lines, one_word_of{"off or vertical"}, "lines of all turns' prompts that decoding reads too");
  }
};

static_assert(check_prefill<lasting_lines>() && lasting_pattern<lasting_lines> && published_pattern<lasting_lines>);

TESSERA_NAMESPACE_END
