// A few threads that share one piece of work at a time.
//
// A piece is a number of chunks, handed out one by one, so that a thread which the system delays holds nobody up: the
// caller works too, and waits at the end only for those who took a chunk. Threads spin for a moment after a piece,
// because the next one usually follows within microseconds, and then sleep. One piece runs at a time; callers on other
// threads wait for their turn. A forked child starts with a fresh pool, since threads do not survive a fork.

#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#define KV_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define KV_PAUSE() __asm__ __volatile__("yield")
#else
#define KV_PAUSE() ((void)0)
#endif

class Pool {
public:
    static Pool& get() {
        static std::once_flag once;
        std::call_once(once, [] {
            instance() = new Pool;
            pthread_atfork([] { instance()->turn_.lock(); }, [] { instance()->turn_.unlock(); }, [] {
                const int wanted = instance()->count_;  // the parent's object stays as it is, its threads are gone
                instance() = new Pool;
                instance()->count_ = wanted;
            });
        });
        return *instance();
    }

    // Held by whoever computes: pieces, scratch memory and the number of threads belong to the holder.
    std::mutex& turn() { return turn_; }

    int count() const { return count_; }

    void set_count(int count) {
        stop();
        count_ = count < 1 ? 1 : count;
    }

    // Calls work(thread, chunk) for every chunk below ``chunks``, and returns when all are done. Throws bad_alloc if a
    // chunk could not have its memory; the others are done or left out then.
    template <class F>
    void run(int64_t chunks, F&& work) {
        if (count_ == 1 || chunks <= 1) {
            for (int64_t chunk = 0; chunk < chunks; ++chunk) work(0, chunk);
            return;
        }
        start();
        work_ = [](void* argument, int thread, int64_t chunk) {
            (*static_cast<std::remove_reference_t<F>*>(argument))(thread, chunk);
        };
        argument_ = const_cast<void*>(static_cast<const void*>(&work));
        chunks_ = chunks;
        next_.store(0, std::memory_order_relaxed);
        publish();
        take_chunks(0);
        uint64_t state = state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int i = 0; (state & ACTIVE); state = state_.load(std::memory_order_acquire)) {
            if (++i < 20000)
                KV_PAUSE();
            else
                std::this_thread::yield();
        }
        if (failed_.exchange(false)) throw std::bad_alloc();
    }

private:
    static constexpr auto SPIN = std::chrono::microseconds(50);
    // The state word: the piece's number, whether it may still be joined, and how many threads have joined it.
    static constexpr uint64_t ACTIVE = 0x7fff, OPEN = 0x8000, NUMBER = 0x10000;

    static Pool*& instance() {
        static Pool* pool = nullptr;  // never destroyed: its threads may still run when the process exits
        return pool;
    }

    static uint64_t number(uint64_t state) { return state / NUMBER; }

    void publish() {
        const uint64_t next = (number(state_.load(std::memory_order_relaxed)) + 1) * NUMBER;
        state_.store(next | OPEN, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> sleep(sleep_);
            wake_.notify_all();
        }
    }

    void start() {
        while (int(threads_.size()) < count_ - 1) {
            const int thread = int(threads_.size()) + 1;
            const uint64_t seen = number(state_.load());
            threads_.emplace_back([this, thread, seen] { serve(thread, seen); });
        }
    }

    void stop() {
        if (threads_.empty()) return;
        stopping_.store(true);
        publish();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
        stopping_.store(false);
        state_.fetch_and(~OPEN);
    }

    void serve(int thread, uint64_t seen) {
        for (;;) {
            uint64_t state = wait_for_piece(seen);
            seen = number(state);
            if (stopping_.load()) return;
            while ((state & OPEN) && number(state) == seen) {
                if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
                take_chunks(thread);
                state_.fetch_sub(1, std::memory_order_acq_rel);
                break;
            }
        }
    }

    void take_chunks(int thread) {
        try {
            for (int64_t chunk; (chunk = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;)
                work_(argument_, thread, chunk);
        } catch (const std::bad_alloc&) {
            failed_.store(true);
            next_.store(chunks_, std::memory_order_relaxed);
        }
    }

    uint64_t wait_for_piece(uint64_t seen) {
        uint64_t state;
        const auto news = [&] { return number(state = state_.load(std::memory_order_seq_cst)) != seen; };
        const auto until = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 64; ++i) {
                if (news()) return state;
                KV_PAUSE();
            }
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> sleep(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(sleep, news);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        return state;
    }

    std::mutex turn_;
    int count_ = 1;
    std::vector<std::thread> threads_;
    void (*work_)(void*, int, int64_t) = nullptr;
    void* argument_ = nullptr;
    int64_t chunks_ = 0;
    std::atomic<bool> stopping_{false}, failed_{false};
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex sleep_;
    std::condition_variable wake_;
};
