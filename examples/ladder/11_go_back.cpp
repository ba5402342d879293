// Rung 11: going back. A draft of several tokens is decoded in one step and cut behind what is accepted; an earlier
// position is continued in another way. A session leaves as bytes and comes back in another cache.
#include <memory>
#include <string>

#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/ladder.hpp"

using namespace tessera;

int main() {
  constexpr index_t q_heads = 8, heads = 2, dim = 64, prompt = 1000, answer = 40, draft = 4;
  const ladder::tensors model(prompt + answer, q_heads, heads, dim), wrong(prompt + answer, q_heads, heads, dim, 7);
  const auto workers = std::make_shared<cpu::executor>();
  using method = snapkv<fp32, dim>;
  method recipe;
  recipe.set_budget(256);
  ladder::checks check;
  cache<method> kv({1, q_heads, heads}, recipe, workers);

  std::vector<float> out(model.q.size()), expected(model.q.size());
  const auto begin = [&] {
    const index_t id = kv.open();
    kv.prefill(0, id, model.queries(0, prompt), model.keys(0, prompt), model.values(0, prompt));
    kv.end_prefill(id);
    return id;
  };
  const auto step = [&](index_t id, const ladder::tensors& tokens, index_t count, std::vector<float>& to) {
    const index_t t = kv.next_position(id);
    kv.decode(0, kv.prepare_step({id}, count), tokens.queries(t, count), tokens.keys(t, count), tokens.values(t, count),
              nhd_rows(to.data() + offset_t(t) * q_heads * dim, count, q_heads, dim));
  };

  // Token by token, as a reference.
  const index_t plain = begin();
  while (kv.next_position(plain) < prompt + answer) step(plain, model, 1, expected);

  // The same answer by drafts of four, of which the model accepts one to four. The rest never was there.
  const index_t drafted = begin();
  index_t drafts = 0;
  for (index_t accepted = 1; kv.next_position(drafted) + draft <= prompt + answer; accepted = accepted % draft + 1) {
    const index_t t = kv.next_position(drafted);
    step(drafted, wrong, draft, out);  // a draft that is rejected as a whole
    kv.truncate(drafted, t);
    step(drafted, model, draft, out);
    kv.truncate(drafted, t + accepted);
    ++drafts;
  }
  const index_t end = kv.next_position(drafted);
  std::printf("%d drafts of %d tokens for %d tokens\n", int(drafts), int(draft), int(end - prompt));
  float largest = 0;  // steps of other lengths add in another order
  for (offset_t i = offset_t(prompt) * q_heads * dim; i < offset_t(end) * q_heads * dim; ++i)
    largest = std::max(largest, std::abs(out[std::size_t(i)] - expected[std::size_t(i)]));
  check(largest < 1e-5f, "drafts give the outputs of single tokens, to rounding");
  kv.truncate(plain, end);
  check(kv.positions(0, drafted, 0) == kv.positions(0, plain, 0), "... and leave the same tokens");

  // SnapKV dropped tokens when the prompt ended: no sequence goes back to before that.
  check(kv.settled(drafted) == prompt, "tokens behind the prompt can be taken back");
  try {
    kv.truncate(drafted, prompt - 1);
  } catch (const error& refused) {
    std::printf("%s\n", refused.what());
  }

  // Another answer from its tenth token on: a fork at an earlier position.
  const index_t other = kv.fork(plain, prompt + 10);
  check(kv.next_position(other) == prompt + 10 && kv.next_position(plain) == end, "a fork goes back alone");
  step(other, model, 1, out);
  const offset_t first = offset_t(prompt + 10) * q_heads * dim;
  check(std::equal(out.begin() + first, out.begin() + first + q_heads * dim, expected.begin() + first),
        "... and goes on with the bits of the original");

  // The session as bytes, as a file would have them. Another cache of the recipe goes on with it, in another process too.
  std::string bytes;
  kv.save(plain, [&](const void* data, std::size_t count) { bytes.append(static_cast<const char*>(data), count); });
  cache<method> later({1, q_heads, heads}, recipe, workers);
  std::size_t read = 0;
  const index_t session = later.load([&](void* data, std::size_t count) {
    count = bytes.copy(static_cast<char*>(data), count, read);
    read += count;
    return count;
  });
  check(later.next_position(session) == end, "a session of another cache stands where it stood");
  std::vector<float> once(std::size_t(q_heads * dim)), again(once.size());
  const auto one = [&](cache<method>& held, index_t id, std::vector<float>& to) {
    held.decode(0, held.prepare_step({id}, 1), model.queries(end - 1, 1), model.keys(end - 1, 1),
                model.values(end - 1, 1), nhd_rows(to.data(), 1, q_heads, dim));
  };
  one(kv, plain, once), one(later, session, again);
  check(once == again, "... and goes on with its bits");
  bytes[bytes.size() / 2] ^= 1;
  read = 0;
  try {
    later.load([&](void* data, std::size_t count) {
      count = bytes.copy(static_cast<char*>(data), count, read);
      read += count;
      return count;
    });
  } catch (const error& refused) {
    std::printf("%s\n", refused.what());
  }
  return check.exit_code();
}
