// GGUF files: blocks against another package's numbers, whole models against their safetensors, and bytes that lie.
#include <random>
#include <span>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/files/gguf.hpp"
#include "engine/tokenizer.hpp"
#include "examples/naive_cache.hpp"
#include "gguf_model.hpp"

using namespace engine_tests;
using engine::gguf_file;

namespace {

gguf_file parsed(const std::string& bytes) {
  return gguf_file::parse(std::as_bytes(std::span(bytes.data(), bytes.size())));
}

/// A tiny model whose tokens have no text.
std::string model_bytes(const tensors& weights, bool tied) {
  gguf_bytes file;
  put_model(file, weights, engine::parse_config(config_text(tied)));
  std::vector<std::string> tokens;
  for (int id = 0; id < 61; ++id) tokens.push_back("t" + std::to_string(id));
  file.texts("tokenizer.ggml.tokens", tokens);
  CHECK(tied == (weights.count("lm_head.weight") == 0));
  return file.bytes();
}

}  // namespace

TEST_CASE("blocks of every type are the numbers that another package makes of them") {
  const auto file = gguf_file::open(std::string(TESSERA_SOURCE_DIR) + "/tests/fixtures/gguf/blocks.gguf");
  int types = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    if (name.ends_with(".expected")) continue;
    CAPTURE(name);
    CHECK(tensor.encoding->name == name);
    CHECK(file.to_fp32(name) == file.to_fp32(name + ".expected"));
    ++types;
  }
  CHECK(types == 12);
  CHECK(std::get<std::vector<double>>(*file.value("numbers")) == std::vector<double>{1.5, -2});
  CHECK(std::get<std::vector<std::int64_t>>(*file.value("wholes")) == std::vector<std::int64_t>{3, -4});
  CHECK(file.texts("texts") == std::vector<std::string>{"one", "two"});
  CHECK(std::get<bool>(*file.value("flag")));
}

TEST_CASE("a model in a GGUF file is the model of its safetensors, to the bit") {
  for (const bool tied : {true, false}) {
    tiny made(tied);
    const auto path = made.folder / "model.gguf";
    made.folder.write("model.gguf", model_bytes(made.weights, tied));
    llama loaded = llama::load(path, made.workers);
    CHECK(loaded.config().head_dim == 64);
    CHECK(loaded.config().tie_word_embeddings == tied);
    naive_cache first(made.model.config()), second(made.model.config());
    const auto tokens = some_tokens(23);
    CHECK(made.model.prefill(tokens, first) == loaded.prefill(tokens, second));
  }
}

TEST_CASE("what a GGUF file lacks, or has of another kind, is refused in a sentence with its path") {
  const temporary_folder folder;
  const auto refused = [&](const gguf_bytes& file, const std::string& sentence) {
    folder.write("a.gguf", file.bytes());
    CHECK_THROWS_WITH(engine::config_of_model(folder / "a.gguf"), contains("a.gguf: ") && contains(sentence));
  };
  gguf_bytes file;
  refused(file, "\"general.architecture\" is missing");
  file.text("general.architecture", "mamba");
  refused(file, "architecture of the file is mamba; expected llama, qwen2, qwen3 or smollm3");
  gguf_bytes scaled;
  scaled.text("general.architecture", "llama");
  scaled.text("llama.rope.scaling.type", "yarn");
  refused(scaled, "llama.rope.scaling.type is given; expected none");
  gguf_bytes stretched;
  stretched.text("general.architecture", "llama");
  stretched.number("llama.rope.scaling.factor", 4);
  refused(stretched, "llama.rope.scaling.factor is given; expected none");
  for (const std::string name :
       {"blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs.bias", "blk.0.attn_q_norm.weight"}) {
    gguf_bytes other;
    other.text("general.architecture", "llama");
    other.tensor(name, {4}, {1, 2, 3, 4});
    refused(other, "tensor \"" + name + "\" is given; expected none but those of the architecture llama");
  }
  gguf_bytes window;
  window.text("general.architecture", "qwen2");
  window.count("qwen2.attention.sliding_window", 4096);
  refused(window, "qwen2.attention.sliding_window is given; expected none or 0");
  for (const auto& factors : {std::vector<float>(31, 1.0f), std::vector<float>(32, 0.0f)}) {
    gguf_bytes slow;
    put_model(slow, random_weights(true), engine::parse_config(config_text(true)));
    slow.texts("tokenizer.ggml.tokens", std::vector<std::string>(61, "t"));
    slow.tensor("rope_freqs.weight", {std::int64_t(factors.size())}, factors);
    refused(slow, "32 numbers in [1e-6, 1e6]");
  }
  gguf_bytes pieces;
  pieces.text("tokenizer.ggml.model", "llama");
  folder.write("b.gguf", pieces.bytes());
  CHECK_THROWS_WITH(engine::tokenizer::of_model(folder / "b.gguf"), contains("expected gpt2"));
  folder.write("c.gguf", "GGUF");
  CHECK_THROWS_WITH(gguf_file::open(folder / "c.gguf"), contains("c.gguf") && contains("rest of the file"));
}

TEST_CASE("a GGUF file that is cut, or has a byte changed, is refused or read, and nothing else") {
  gguf_bytes file;
  put_tokenizer(file, {{"a", "b"}, {"ab", "c"}}, "smollm");
  file.tensor("one", {2, 3}, {1, 2, 3, 4, 5, 6});
  file.tensor("two", {4}, {1, 2, 3, 4});
  const std::string whole = file.bytes();
  CHECK(parsed(whole).to_fp32("one") == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(parsed(whole).find("two")->shape == std::vector<std::int64_t>{4});
  std::mt19937 random(3);
  int read = 0;
  for (std::size_t size = 0; size < whole.size() - 16; size += 1 + random() % 5)
    CHECK_THROWS_AS(parsed(whole.substr(0, size)), tessera::error);
  for (int i = 0; i < 4000; ++i) {
    std::string changed = whole;
    changed[random() % changed.size()] = char(random());
    try {
      const gguf_file got = parsed(changed);
      for (const auto& [name, tensor] : got.tensors()) read += !got.to_fp32(name).empty();
    } catch (const tessera::error&) {
    }
  }
  CHECK(read > 1000);
}
