// Who runs the items of an operation: a small thread pool that the caller owns, or an engine's own threads. No global
// state, no OpenMP.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "../../../core/config.hpp"
#include "../../../core/error.hpp"
#include "../../../core/host/float_mode.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/host/process.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Says that an executor has no threads of its own and works on those of an engine: see `executor::operation`.
struct engine_threads_tag {};
inline constexpr engine_threads_tag engine_threads{};  ///< the tag: executor(engine_threads, 8)

/// Runs independent items on all cores: on a pool of its own, on the threads of an engine that calls an operation on
/// all of them at once, or with 1 thread on the caller alone.
///
/// Items are distributed dynamically. An operation that must give the same bits every time lets each item write its own
/// output and merges in item order afterwards: no result may depend on which worker ran an item. Items run in the
/// floating-point mode that programs begin with, whatever the caller's is.
/// Any thread may call `for_each` at any time. While the workers are busy with another call, and in a child of fork(),
/// which has no workers, the items run on the calling thread.
class executor {
 public:
  static constexpr double worth_waking = 1 << 20;

  /// Starts `threads` workers, the calling thread included; 0: one for every core.
  /// If the system starts fewer (a container's limit), the executor uses those. If these still outnumber the cores, it
  /// uses half of them, because memory for stacks may be short. See `threads` and `refused`.
  explicit executor(int threads = 0) {
    if (threads <= 0) threads = (std::max)(1, int(std::thread::hardware_concurrency()));
    if (threads == 1) return;
    helpers_ = std::make_unique<helpers>();
    helpers_->start(threads - 1);
    refused_ = threads - this->threads();
    if (helpers_->threads.empty()) helpers_ = nullptr;
  }

  /// Starts no thread. At most `threads` threads of an engine, the one that calls included, work in an `operation`;
  /// outside of one the calling thread works alone.
  executor(engine_threads_tag, int threads) : is_of_engine_(true) {
    require(threads >= 1, "threads of the engine", threads, "at least 1", "pass how many work on an operation at most");
    if (threads == 1) return;
    helpers_ = std::make_unique<helpers>();
    helpers_->lent = threads - 1;
  }

  executor(const executor&) = delete;
  executor& operator=(const executor&) = delete;

  /// In a child of fork() the memory of the threads is not released: their locks cannot be undone there.
  ~executor() {
    if (!has_threads()) (void)helpers_.release();
  }

  int threads() const noexcept { return helpers_ ? int(helpers_->threads.size()) + helpers_->lent + 1 : 1; }
  /// Requested threads that the system did not start.
  int refused() const noexcept { return refused_; }

  /// Calls `body(item, worker)` for every item in [0, count), with a worker in [0, threads()); 0 is the calling thread.
  /// Returns when all are done; rethrows the first exception that an item threw.
  /// `cost` estimates the multiply-adds of all items. Waking a helper takes about 25 us (2-core EPYC VM), so that work
  /// below `worth_waking` runs on the calling thread.
  template <class Body>
  void for_each(index_t count, Body&& body, double cost = 1e9) {
    if (count <= 0) return;
    const default_float_mode mode;
    if (count == 1 || cost < worth_waking || !enter()) {
      for (index_t item = 0; item < count; ++item) body(item, 0);
      return;
    }
    using body_type = std::remove_reference_t<Body>;
    const std::exception_ptr failure = helpers_->run(
        count, [](void* object, index_t item, int worker) { (*static_cast<body_type*>(object))(item, worker); },
        const_cast<void*>(static_cast<const void*>(&body)));
    is_busy_.store(false, std::memory_order_release);
    if (failure) std::rethrow_exception(failure);
  }

  /// An operation that an engine runs on `threads` of its threads at once. Thread 0 makes this object, calls caches,
  /// and destroys it; each of the others calls `serve`, in the same operation, and returns when that is over:
  ///
  ///   void attention(int ith, int nth) {  // as ggml calls it
  ///     if (ith > 0) return workers->serve(ith);
  ///     const tessera::cpu::executor::operation all(*workers, nth);
  ///     cache.decode(layer, step, q, k, v, out);
  ///   }
  ///
  /// A thread that comes late joins the items that are left. The end of the operation waits until all of them have
  /// come; the executor must outlive their return. Operations do not nest, and the engine's threads meet between two.
  /// Errors   an executor with threads of its own; more threads than it was made for: tessera::error. The others wait
  ///          for an operation then: ask threads() before.
  class operation {
   public:
    operation(executor& all, int threads) : all_(all), others_(threads - 1) {
      require(all.is_of_engine_, "threads of the executor", "its own", "an engine's",
              "make it of engine_threads and their number");
      require(threads >= 1 && threads <= all.threads(), "threads of an operation", threads,
              "1 to " + std::to_string(all.threads()), "make the executor for as many as the engine has");
    }
    ~operation() {
      if (all_.has_threads()) all_.helpers_->release(others_);
    }
    operation(const operation&) = delete;
    operation& operator=(const operation&) = delete;

   private:
    executor& all_;
    int others_;
  };

  /// Works on an operation's items until it is over. `worker`: the engine's number of the calling thread, in
  /// [1, threads()), which no other thread has. Errors: another number, or threads of its own: tessera::error.
  void serve(int worker) {
    require(is_of_engine_ && worker >= 1 && worker < threads(), "number of a thread that serves", worker,
            "1 to " + std::to_string(threads() - 1) + " of an executor of engine_threads",
            "let thread 0 call the cache, and make the executor for as many threads as the engine has");
    if (has_threads()) helpers_->lend(worker);
  }

 private:
  /// The threads beside the caller's, and the state that they share.
  struct helpers {
    using call_type = void (*)(void*, index_t, int);

    ~helpers() { keep(0); }

    /// Starts as many threads as the system allows.
    void start(int wanted) {
      threads.reserve(std::size_t(wanted));
      try {
        for (int worker = 1; worker <= wanted; ++worker) threads.emplace_back([this, worker] { serve(worker); });
      } catch (const std::system_error&) {
        const std::size_t cores = (std::max)(1u, std::thread::hardware_concurrency());
        keep((std::max)(threads.size() / 2, (std::min)(threads.size(), cores - 1)));
      }
    }
    /// Ends and joins all but the first `retained` threads: one that is not joined would wait on destroyed members.
    void keep(std::size_t retained) noexcept {
      {
        std::lock_guard lock(mutex);
        last_worker = retained;
      }
      wake.notify_all();
      for (; threads.size() > retained; threads.pop_back()) threads.back().join();
    }

    /// Runs all items. Returns the first exception that one threw.
    std::exception_ptr run(index_t items, call_type made, void* with) {
      {
        std::lock_guard lock(mutex);
        call = made;
        object = with;
        count = items;
        next.store(0, std::memory_order_relaxed);
        busy = int(threads.size()) + arrived;
        is_active = true;
        round.fetch_add(1, std::memory_order_release);
      }
      wake.notify_all();
      work(0);
      std::unique_lock lock(mutex);
      done.wait(lock, [this] { return busy == 0; });
      is_active = false;
      done.notify_all();  // an operation may wait to end
      return failure ? std::exchange(failure, nullptr) : nullptr;
    }
    void serve(int worker) {
      const default_float_mode mode;  // a thread begins in the mode of the one that starts it
      follow(worker, 0, [&] { return std::size_t(worker) > last_worker; });
    }
    /// A thread of the engine, for one operation.
    void lend(int worker) {
      const default_float_mode mode;
      std::uint64_t observed = 0, mine = 0;
      {
        std::lock_guard lock(mutex);
        observed = round.load(std::memory_order_relaxed), mine = operations.load(std::memory_order_relaxed);
        ++arrived;
        if (is_active) ++busy, --observed;  // joins the round that runs
      }
      done.notify_all();
      follow(worker, observed, [&] { return operations.load(std::memory_order_acquire) != mine; });
    }
    /// Ends an operation, once all `others` have come.
    void release(int others) {
      std::unique_lock lock(mutex);
      done.wait(lock, [&] { return arrived >= others && !is_active; });  // another thread's round may count them
      arrived = 0;
      operations.fetch_add(1, std::memory_order_release);
      lock.unlock();
      wake.notify_all();
    }
    /// Works whenever a round begins, until `leaves`. A lent thread has nothing else to do: it looks for a while before
    /// it sleeps, because operations are short.
    template <class Leaves>
    void follow(int worker, std::uint64_t observed, const Leaves& leaves) {
      for (;;) {
        for (int looks = 0; lent > 0 && looks < 4000; ++looks) {
          if (round.load(std::memory_order_acquire) != observed || leaves()) break;
        }
        {
          std::unique_lock lock(mutex);
          const auto begins = [&] { return round.load(std::memory_order_relaxed) != observed; };
          wake.wait(lock, [&] { return leaves() || begins(); });
          if (leaves()) return;
          observed = round.load(std::memory_order_relaxed);
        }
        work(worker);
        std::lock_guard lock(mutex);
        if (--busy == 0) done.notify_all();
      }
    }
    void work(int worker) {
      for (index_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        try {
          call(object, item, worker);
        } catch (...) {
          std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    }

    host_vector<std::thread> threads;
    std::mutex mutex;
    std::condition_variable wake, done;
    std::atomic<index_t> next{0};
    index_t count = 0;
    int busy = 0;
    bool is_active = false;     // a round runs
    int lent = 0, arrived = 0;  // threads of an engine: at most, and those that serve now
    std::atomic<std::uint64_t> round{0}, operations{0};
    std::size_t last_worker = ~std::size_t(0);  // workers with higher numbers end
    call_type call = nullptr;
    void* object = nullptr;
    std::exception_ptr failure;
  };

  bool has_threads() const noexcept { return helpers_ && home_.is_here(); }
  /// Claims the helpers for this call. Returns whether that worked.
  bool enter() noexcept { return has_threads() && !is_busy_.exchange(true, std::memory_order_acquire); }

  std::unique_ptr<helpers> helpers_;  // none: the calling thread alone
  home_process home_;                 // theirs
  std::atomic<bool> is_busy_{false};
  bool is_of_engine_ = false;
  int refused_ = 0;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
