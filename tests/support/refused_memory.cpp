// A host that refuses memory, by LD_PRELOAD: as soon as the file REFUSE_WHEN exists, a program gets no piece of REFUSE_FROM bytes
// or more.

#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <unistd.h>

namespace {

template <class F> F real(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

bool refuses(size_t bytes) {
    // `getenv` and `access` ask for no memory.
    const char *from = getenv("REFUSE_FROM"), *when = getenv("REFUSE_WHEN");
    if (!from || !when || bytes < strtoull(from, nullptr, 10) || access(when, F_OK) != 0) return false;
    errno = ENOMEM;
    return true;
}

} // namespace

extern "C" {
void* malloc(size_t bytes) {
    static auto call = real<void* (*)(size_t)>("malloc");
    return refuses(bytes) ? nullptr : call(bytes);
}

void* realloc(void* memory, size_t bytes) {
    static auto call = real<void* (*)(void*, size_t)>("realloc");
    return refuses(bytes) ? nullptr : call(memory, bytes);
}

int posix_memalign(void** memory, size_t alignment, size_t bytes) {
    static auto call = real<int (*)(void**, size_t, size_t)>("posix_memalign");
    return refuses(bytes) ? ENOMEM : call(memory, alignment, bytes);
}
}
