// tessera compress
#include <algorithm>
#include <cstdio>
#include <optional>

#include "commands.hpp"
#include "compress.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "progress.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

/// Takes rope_theta out of the settings: it is a fact of the model and no parameter of a method.
std::optional<float> taken_rope_theta(std::vector<setting>& settings) {
  const auto found = std::ranges::find(settings, "rope_theta", &setting::name);
  if (found == settings.end()) return std::nullopt;
  constexpr tessera::value_range allowed{1.0f, 1e12f};
  float theta = 0;
  parse_value("rope_theta", found->value, allowed.text(), theta);
  allowed.check("rope_theta", theta, "pass rope_theta of the model's config.json");
  settings.erase(found);
  return theta;
}

}  // namespace

void compress_file(const compress_file_options& given) {
  compress_options chosen;
  const method_info& method = find_method(given.method.method);
  chosen.method = method.name;
  chosen.settings = given.method.parsed_settings();
  chosen.rope_theta = taken_rope_theta(chosen.settings);
  (void)method.configured(chosen.settings);
  chosen.where = require_backend(given.method.backend);
  if (!method.has_budget && !given.method.budget.empty()) {
    note("--budget has no effect: " + method.name + " keeps everything");
  } else {
    chosen.budget = given.method.parsed_budget(method);
  }
  chosen.scores = given.scores;
  chosen.workers = make_workers(given.threads);
  engine::require_writable(given.out);
  const compressed result = [&] {
    progress_line progress(method.name + " over " + engine::printable(given.in));
    return compress(engine::safetensors_file::open(given.in), chosen);
  }();
  result.file.write(given.out);
  if (!result.unused.empty()) {
    constexpr std::size_t most = 5;
    std::vector<std::string> names;
    for (const std::string& name : result.unused) {
      if (names.size() < most) names.push_back(engine::printable(name));
    }
    if (result.unused.size() > most) names.push_back(std::to_string(result.unused.size() - most) + " more");
    note("not used by " + method.name + ": tensor " + joined(names));
  }
  if (chosen.scores && result.ranked == 0) {
    note(
        "--scores wrote none: nothing was ranked, because the budget covers every token or the schedule has not fired");
  }
  for (const parameter_info& parameter : method.configured(chosen.settings)) {
    if (parameter.name == "layers" && parameter.value == "-1") {
      note("without --set layer and layers, " + method.name + " of one layer keeps the same number in each, as snapkv");
    }
  }
  std::printf("%s kept %.1f of %d tokens per KV head, %s of %s", method.name.c_str(),
              double(result.kept) / result.kv_heads, result.tokens, bytes_text(double(result.bytes_held)).c_str(),
              bytes_text(double(result.bytes_full)).c_str());
  if (result.reads.steps > 0) {
    std::printf("; %d decode steps read %s each", result.reads.steps,
                bytes_text(double(result.reads.bytes) / result.reads.steps).c_str());
  }
  std::printf(". Wrote %s\n", engine::printable(given.out).c_str());
}

}  // namespace tool
