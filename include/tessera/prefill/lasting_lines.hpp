// LoopServe's lines, which decode steps may read too.
#pragma once

#include "covering_lines.hpp"

TESSERA_NAMESPACE_BEGIN

/// What of a prompt's lines decoding reads.
enum class read_lines { off, vertical, both };

/// As `covering_lines`; with `lines` vertical the columns of all turns' prompts, of all query heads that share a list,
/// join what the first stage lets a turn's steps read. With `lines` both the slash lines join, too: a slash line of
/// distance d says for a step at position p the key p - d. A step of several tokens reads what any of them asks for.
/// Lines come on top of the first stage's budget.
/// Errors   as `covering_lines`; `lines` both on a device: tessera::error.
/// Cost     as `covering_lines`; a bit a token and query head of columns that are remembered. With `lines` both, a
///          number for each distance and query head, and every step makes its lists anew.
/// Paper    LoopServe, arXiv:2507.13681, Algorithm 4, which hands both kinds of lines to decoding and does not say what
///          a slash line means for rows to come.
struct lasting_lines : covering_lines {
  static constexpr const char* name = "lasting_lines";

  read_lines lines = read_lines::off;

  bool adds_to_reading() const { return lines != read_lines::off; }
  bool adds_slashes() const { return lines == read_lines::both; }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    covering_lines::parameters(self, visit);
    visit("lines", self.lines, one_word_of{"off, vertical or both"},
          "lines of all turns' prompts that decoding reads too; both, with slash lines: on the CPU only");
  }
};

static_assert(check_prefill<lasting_lines>() && lasting_pattern<lasting_lines> && published_pattern<lasting_lines>);

TESSERA_NAMESPACE_END
