// A step that never ends, in a program whose time passes quickly, by LD_PRELOAD. Once the program has written its report
// memory.json as often as HANG_AFTER says, the opening number HANG_AT of /proc/self/status never returns: a step that reports its
// memory hangs there, as it does in a call to a device that no longer answers. Clocks run HANG_SPEED times as fast as the
// machine's, and waiting with a time limit ends as much earlier.

#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

namespace {

long number(const char* name) { return atol(getenv(name)); }

template <class F> F real(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

constexpr long long SECOND = 1'000'000'000;

long long nanoseconds(const timespec& time) { return time.tv_sec * SECOND + time.tv_nsec; }

timespec timespec_of(long long time) { return {time / SECOND, time % SECOND}; }

long long now(clockid_t clock) {
    static auto call = real<int (*)(clockid_t, timespec*)>("clock_gettime");
    timespec time;
    call(clock, &time);
    return nanoseconds(time);
}

// When the quick clock began, which shows the same time then as the machine's.
const long long began = now(CLOCK_MONOTONIC);
const long long speed = number("HANG_SPEED");

std::atomic<long> reports{0}, openings{0};

} // namespace

extern "C" {
int clock_gettime(clockid_t clock, timespec* time) noexcept {
    const long long machines = now(clock);
    *time = timespec_of(clock == CLOCK_MONOTONIC && began ? began + (machines - began) * speed : machines);
    return 0;
}

// Threads wait until a time of the quick clock.
long syscall(long name, ...) noexcept {
    va_list arguments;
    va_start(arguments, name);
    long words[6];
    for (long& word : words) word = va_arg(arguments, long);
    va_end(arguments);
    timespec until;
    const bool waits = name == SYS_futex && (words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET;
    if (waits && words[3] != 0 && !(words[1] & FUTEX_CLOCK_REALTIME)) {
        until = timespec_of(began + (nanoseconds(*reinterpret_cast<timespec*>(words[3])) - began) / speed);
        words[3] = reinterpret_cast<long>(&until);
    }
    static auto call = real<long (*)(long, long, long, long, long, long, long)>("syscall");
    return call(name, words[0], words[1], words[2], words[3], words[4], words[5]);
}

int rename(const char* from, const char* to) noexcept {
    static auto call = real<int (*)(const char*, const char*)>("rename");
    const int result = call(from, to);
    if (strstr(to, "memory.json")) ++reports;
    return result;
}

int open64(const char* path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    if (strcmp(path, "/proc/self/status") == 0 && reports >= number("HANG_AFTER") && ++openings == number("HANG_AT")) {
        for (;;) pause();
    }
    static auto call = real<int (*)(const char*, int, ...)>("open64");
    return call(path, flags, mode);
}
}
