// tessera compress
#include <cstdio>

#include "commands.hpp"
#include "compress.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "progress.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/values.hpp"

namespace tool {
void compress_file(const compress_file_options& given) {
  compress_options chosen;
  const method_info& method = given.method.checked_method();
  chosen.method = method.name;
  if (!method.has_budget && !given.method.budget.empty()) {
    note("--budget has no effect: " + method.name + " keeps everything");
  } else {
    chosen.budget = given.method.parsed_budget(method);
  }
  chosen.settings = given.method.parsed_settings();
  chosen.where = require_backend(given.method.backend);
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
    note("--scores wrote none: the budget covers every token, so that nothing was ranked");
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
