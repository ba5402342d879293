// What came out of an evaluation: a table for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include "evaluate.hpp"

namespace tool {

/// Rows method x budget; columns families in percent of the best score (one per turn where a family has several), memory held in
/// percent of the full cache, bytes read per step; where prompts attend lines also which share of their pairs of row and key is
/// computed. `averages`: and the mean over the families, each with the mean of its turns.
std::string table_text(const std::vector<variant>& variants, const std::vector<cell>& cells, bool averages = false);

/// A JSON array with one object a cell: method, budget (null where the method has none), parameters, family, turn,
/// questions, right, metric, score (the mean, from 0 to 1), bytes_held, bytes_full, bytes_read_per_step, prompt_tokens and
/// prompt_tokens_reused (of these, which another question had read), prompt_pairs (share of the
/// pairs of row and key that are attended, 1 where all are), answers (what the model wrote), verdicts, and scores where
/// they are not all 0 or 1. Where the tool chose `max_new`, it is the longest of the
/// cell's answer limits.
std::string json_text(const std::vector<variant>& variants, const std::vector<cell>& cells, const scoring& how = {});

/// A line that says which `max_new` the methods got that have it and no setting for it; empty where there is none.
std::string limits_text(const std::vector<variant>& variants, const std::vector<cell>& cells);

/// What questions about one document saved, in time and memory, and who reads every prompt anew; empty where every document has one
/// question.
std::string prefix_text(const prefix_use& use);

/// "1.5 MiB"
std::string bytes_text(double bytes);

}  // namespace tool
