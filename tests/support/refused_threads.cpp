// A host that refuses threads, by LD_PRELOAD: a program gets the first GIVE_THREADS of them, and no more.

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <pthread.h>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
    using Call = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static auto call = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pthread_create"));
    static std::atomic<long> given = 0;
    const char* most = getenv("GIVE_THREADS");
    if (most && given++ >= strtol(most, nullptr, 10)) return EAGAIN;
    return call(thread, attributes, start, argument);
}
