// Calibrated profiles as JSON files.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <tessera/runtime/profile.hpp>
#include <vector>

namespace tool {

/// How much alike the orders of heads are by their shares: over all samples, and over the families of the documents.
struct rank_stability {
  double mean = 0, least = 0;                      ///< of each sample with the mean of all
  std::vector<std::string> families;               ///< of the documents
  std::vector<std::vector<double>> family_shares;  ///< by family: mean shares [layers, kv_heads]
  std::vector<std::vector<double>> between;        ///< [families, families]
};

/// { "version": 1, "model", "method", "share", "samples", "alpha", and "mean", "deviation", "budget", each [layers][kv_heads] }.
/// Other names are left alone. Errors: text that is none of this, another version, and all that profile::check refuses; the
/// message begins with `source`.
tessera::profile parse_profile(std::string_view text, std::string_view source);
tessera::profile read_profile(const std::filesystem::path& path);

std::string profile_text(const tessera::profile& profile);
/// With "stability" beside it, for pictures.
std::string profile_text(const tessera::profile& profile, const rank_stability& stability);

}  // namespace tool
