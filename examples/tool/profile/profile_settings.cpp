#include "profile_settings.hpp"

#include <algorithm>

#include "tool/methods/values.hpp"

namespace tool {

profile_settings profile_settings::taken_from(std::vector<setting>& given) {
  profile_settings chosen;
  std::string of_profile;  // one that says something of a profile only
  const auto take = [&](const char* name, const auto& use) {
    const auto found = std::find_if(given.begin(), given.end(), [&](const setting& one) { return one.name == name; });
    if (found == given.end()) return;
    const std::string value = found->value;
    given.erase(found);
    if (name != std::string_view("profile")) of_profile = name;
    use(value);
  };
  take("profile", [&](const std::string& value) {
    tessera::require(!value.empty(), "profile", "empty", "none, or a file that `tessera calibrate` wrote", "name it");
    if (value != "none") chosen.file = value;
  });
  take("alpha", [&](const std::string& value) {
    double alpha = 0;
    parse_value("alpha", value, tessera::profile::alphas.text(), alpha);
    tessera::profile::alphas.check("alpha", alpha, "pass how many deviations above its mean a head keeps");
    chosen.alpha = alpha;
  });
  take("layer", [&](const std::string& value) { chosen.layer = index_t(parse_count("layer", value, 0, 1 << 16)); });
  take("slack", [&](const std::string& value) {
    require_one_of("slack", value, {"empty", "fill"});
    chosen.fills = value == "fill";
  });
  tessera::require(of_profile.empty() || !chosen.file.empty(), of_profile, "set without a profile",
                   "a profile beside it", "add --set profile=FILE, or leave it out");
  return chosen;
}

std::vector<parameter_info> profile_settings::shown(const tessera::profile* profile) const {
  const double deviations = alpha ? *alpha : profile ? profile->alpha : 2;
  return {
      {"profile", file.empty() ? "none" : file, "none, or a file",
       "JSON of `tessera calibrate`: what each KV head keeps; none: all heads the same, by --budget"},
      {"alpha", value_text(float(deviations)), tessera::profile::alphas.text(),
       "deviations above its mean that a head keeps; unset: the profile's own budgets"},
      {"layer", value_text(layer), "0 to 65536", "which layer of the profile this is, where one is compressed alone"},
      {"slack", fills ? "fill" : "empty", "empty or fill",
       "whether heads leave pages of their group empty, or keep as many tokens as its longest head"}};
}

}  // namespace tool
