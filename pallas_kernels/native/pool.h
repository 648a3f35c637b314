// Threads that share the chunks of one job at a time.
//
// The caller works too, so a job ends even if no other thread ever wakes up. Between two jobs that follow each other
// closely, as the products of a decoding step do, threads wait by spinning (they wake in less than a microsecond);
// later they sleep.
#ifndef EFFML_POOL_H_
#define EFFML_POOL_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>

namespace effml {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whole cores that one control group may use, at least 1 and at most `most`. A process that runs more threads than that
// is stopped for the rest of every period, whoever holds a chunk then.
inline int cores_of_group(const std::string& folder, int most) {
  double quota = 0, period = 0;
  std::ifstream(folder + "/cpu.max") >> quota >> period;  // "max" is no number: no limit
  if (period <= 0) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::clamp(int(quota / period), 1, most) : most;
}

// The least of `most` and of what the groups named in the file `groups` (/proc/self/cgroup), and those above them,
// leave. `root` is where they are mounted; a container often sees its own group there.
inline int cores(const std::string& root, const std::string& groups, int most) {
  std::ifstream lines(groups);
  for (std::string line; std::getline(lines, line);) {  // "0::/own/group", or "4:cpu,cpuacct:/own/group" of version 1
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string kinds = line.substr(first + 1, second - first - 1);
    if (!kinds.empty() && ("," + kinds + ",").find(",cpu,") == std::string::npos) continue;
    const std::string mounted = kinds.empty() ? root : root + "/cpu";
    std::string own = line.substr(second + 1);
    for (;;) {
      most = cores_of_group(mounted + own, most);
      if (own.empty() || own == "/") break;
      own.erase(own.rfind('/'));
    }
  }
  return most;
}

class Pool {
 public:
  // Never destroyed: threads may still wait in it when the process ends.
  static Pool& get() {
    static Pool* pool = new Pool();
    return *pool;
  }

  int threads() const { return helpers_ + 1; }

  // Calls work(context, chunk) for every chunk in 0..chunks-1, each once.
  void run(int chunks, void (*work)(void*, int), void* context) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    // Another program is using the threads, or this process is a fork, which has none.
    if (chunks == 1 || helpers_ == 0 || !alone.owns_lock() || getpid() != process_) {
      for (int chunk = 0; chunk < chunks; ++chunk) work(context, chunk);
      return;
    }
    work_ = work;
    context_ = context;
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | uint64_t(chunks) << 16, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    while (take()) {
    }
    for (int spins = 0; finished_.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins < 20000) pause_briefly();
      else std::this_thread::yield();
    }
  }

 private:
  Pool() : process_(getpid()) {
    // Memory bandwidth, not arithmetic, is the limit; a few cores reach it.
    const int most = std::clamp(int(std::thread::hardware_concurrency()), 1, 16);
    helpers_ = cores("/sys/fs/cgroup", "/proc/self/cgroup", most) - 1;
    for (int i = 0; i < helpers_; ++i) std::thread([this] { help(); }).detach();
  }

  // Ticket: job number (32 bits), chunks (16), next chunk (16). A chunk that was taken keeps its job alive until it is
  // finished, so work_ and context_ belong to it.
  bool take() {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const int next = int(seen & 0xffff), chunks = int(seen >> 16 & 0xffff);
      if (next >= chunks) return false;
      if (ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
        work_(context_, next);
        finished_.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void help() {
    using clock = std::chrono::steady_clock;
    for (;;) {
      while (take()) {
      }
      const auto until = clock::now() + std::chrono::microseconds(500);
      bool found = false;
      for (int spins = 0; !found; ++spins) {
        found = waiting();
        if (spins % 64 == 63) {
          if (clock::now() > until) break;
          std::this_thread::yield();  // a thread with real work goes first
        }
        pause_briefly();
      }
      if (found) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [this] { return waiting(); });
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  bool waiting() const {
    const uint64_t seen = ticket_.load(std::memory_order_seq_cst);
    return (seen & 0xffff) < (seen >> 16 & 0xffff);
  }

  const pid_t process_;
  int helpers_ = 0;
  std::mutex busy_, mutex_;
  std::condition_variable wake_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> finished_{0};
  alignas(64) std::atomic<int> sleeping_{0};
};

}  // namespace effml

#endif  // EFFML_POOL_H_
