#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "catch.hpp"
#include "engine/ops.hpp"

namespace {

using engine::llama_config;
using tessera::cpu::executor;

llama_config small_config() {
  llama_config config{};
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 64;
  config.rope_theta = 1000;
  return config;
}

}  // namespace

TEST_CASE("products agree with a plain loop around every tile edge, on one thread and on two") {
  executor workers(2), alone(1);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int rows : {1, 8, 9, 127, 128, 129})
    for (const int outputs : {1, 17, 511, 513, 2000}) {
      const int inputs = 70;
      engine::matrix weight{outputs, inputs, std::vector<float>(std::size_t(outputs * inputs))};
      std::vector<float> x(std::size_t(rows * inputs)), y(std::size_t(rows * outputs), -1.0f);
      for (auto& value : weight.values) value = normal(random);
      for (auto& value : x) value = normal(random);
      engine::linear(workers, x.data(), rows, weight, y.data());
      std::vector<float> same(y.size());
      engine::linear(alone, x.data(), rows, weight, same.data());
      double worst = 0;
      for (int row = 0; row < rows; ++row)
        for (int output = 0; output < outputs; ++output) {
          double sum = 0;
          for (int i = 0; i < inputs; ++i)
            sum += double(x[std::size_t(row * inputs + i)]) * weight.values[std::size_t(output * inputs + i)];
          worst = std::max(worst, std::abs(sum - y[std::size_t(row * outputs + output)]));
        }
      INFO(rows << " rows, " << outputs << " outputs");
      CHECK(worst < 70 * 16 * std::numeric_limits<float>::epsilon());
      CHECK(y == same);
    }
}

TEST_CASE("where a buffer lies in memory does not change a bit") {
  executor workers(2);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr int width = 75, rows = 33, outputs = 40;
  std::vector<float> weight(width), input(rows * 2 * width);
  engine::matrix square{outputs, width, std::vector<float>(outputs * width)};
  for (auto* values : {&weight, &input, &square.values})
    for (auto& value : *values) value = normal(random);

  std::vector<float> first;
  for (std::size_t shift = 0; shift < 16; ++shift) {
    std::vector<float> x(shift), y(3 * rows * 2 * width + shift);
    x.insert(x.end(), input.begin(), input.end());
    const float* in = x.data() + shift;
    float* out = y.data() + shift;
    engine::swiglu(workers, in, rows, width, out);
    engine::rms_norm(workers, in, rows, weight, 1e-5f, out += rows * width);
    engine::linear(workers, in, rows, square, out += rows * width);
    engine::linear(workers, in, 3, square, out += rows * outputs);
    y.erase(y.begin(), y.begin() + std::ptrdiff_t(shift));
    if (first.empty()) first = y;
    CHECK(y == first);
  }
}

TEST_CASE("RoPE turns element i with element i plus half by the angle of its position") {
  llama_config config = small_config();
  executor workers(1);
  const auto frequencies = engine::rope_frequencies(config);
  REQUIRE(frequencies.size() == 32);
  CHECK(frequencies[0] == 1.0f);
  CHECK(frequencies[16] == Approx(1 / std::sqrt(1000.0)));
  const int tokens = 33;
  std::vector<float> qkv(std::size_t(tokens * 512)), q(std::size_t(tokens * 256)), k(std::size_t(tokens * 128)), v(k);
  for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = float(i % 512 == 3 || i % 512 == 256 + 64 + 35);
  const auto table = engine::make_rope_table(frequencies, 7, tokens);
  engine::split_and_rotate(workers, config, table, qkv.data(), tokens, q.data(), k.data(), v.data());
  for (int token = 0; token < tokens; ++token) {
    const double angle = (7 + token) * std::pow(1000.0, -3.0 / 32);
    // Head 0 of q holds 1 at element 3; head 1 of k holds 1 at element 35, the partner of 3.
    CHECK(q[std::size_t(token * 256 + 3)] == Approx(std::cos(angle)).margin(1e-5));
    CHECK(q[std::size_t(token * 256 + 35)] == Approx(std::sin(angle)).margin(1e-5));
    CHECK(k[std::size_t(token * 128 + 64 + 3)] == Approx(-std::sin(angle)).margin(1e-5));
    CHECK(k[std::size_t(token * 128 + 64 + 35)] == Approx(std::cos(angle)).margin(1e-5));
  }
}

TEST_CASE("Llama 3's scaling keeps fast rotations, slows slow ones by its factor and blends between") {
  llama_config config = small_config();
  config.rope_theta = 1e6;
  const auto plain = engine::rope_frequencies(config);
  config.rope_scaling = engine::llama3_rope{8.0, 1.0, 4.0, 1024};
  const auto scaled = engine::rope_frequencies(config);
  int blended = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    const double turns = 1024 * double(plain[i]) / (2 * 3.14159265358979);
    if (turns > 4) {
      CHECK(scaled[i] == plain[i]);
    } else if (turns < 1) {
      CHECK(scaled[i] == Approx(plain[i] / 8));
    } else {
      ++blended;
      CHECK(scaled[i] == Approx(plain[i] * (1 / 8.0 * (4 - turns) / 3 + (turns - 1) / 3)));
    }
  }
  CHECK(blended > 0);
}

TEST_CASE("norms and gates agree with their formulas for every width around a vector") {
  executor workers(2);
  for (const int width : {1, 15, 16, 17, 31, 33, 80}) {
    constexpr int rows = 33;
    std::vector<float> weight(std::size_t(width), 0.5f), x(std::size_t(rows * 2 * width)), y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3 * std::sin(float(i)) + 1;
    double worst = 0;
    engine::rms_norm(workers, x.data(), rows, weight, 1e-5f, y.data());
    for (int row = 0; row < rows; ++row) {
      double squares = 0;
      for (int i = 0; i < width; ++i) squares += std::pow(double(x[std::size_t(row * width + i)]), 2);
      for (int i = 0; i < width; ++i) {
        const double expected = 0.5 * x[std::size_t(row * width + i)] / std::sqrt(squares / width + 1e-5);
        worst = std::max(worst, std::abs(expected - y[std::size_t(row * width + i)]));
      }
    }
    engine::swiglu(workers, x.data(), rows, width, y.data());
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < width; ++i) {
        const double gate = x[std::size_t(row * 2 * width + i)], up = x[std::size_t(row * 2 * width + width + i)];
        worst = std::max(worst, std::abs(gate / (1 + std::exp(-gate)) * up - y[std::size_t(row * width + i)]));
      }
    INFO("width " << width);
    CHECK(worst < 64 * std::numeric_limits<float>::epsilon());
  }
}

TEST_CASE("a very negative gate closes and a very positive one passes") {
  executor workers(1);
  const std::vector<float> gate_up{-1e4f, -200.0f, 200.0f, 1.0f, 1.0f, 2.0f};
  std::vector<float> y(3);
  engine::swiglu(workers, gate_up.data(), 1, 3, y.data());
  CHECK(std::abs(y[0]) < 1e-30f);
  CHECK(std::abs(y[1]) < 1e-30f);
  CHECK(y[2] == 400.0f);
}
