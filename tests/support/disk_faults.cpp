// Makes disk operations of a program fail, by LD_PRELOAD. Every operation that changes something below the folder FAULT_ROOT
// is counted. Operation number FAULT_AT fails with FAULT_ERRNO; with FAULT_FOR_GOOD every later one does too. With
// FAULT_SIGNAL the process gets that signal instead, in front of the operation. At its end the program writes the number of
// operations to the file FAULT_COUNT. With FAULT_LOG each operation that was made, the opening of files and folders too, is
// appended to that file: a line `name|file descriptor|path|other path|size`, and the bytes that were written. As long as the
// file FAULT_HOLD exists, no file of a checkpoint is synced: the disk is slow. A file or folder whose path ends with
// FAULT_KEEPS cannot be deleted. With FAULT_READS the operations are those that read files below the root, and not those that
// change something.

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <mutex>
#include <string>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

std::atomic<long> operations{0};
// Which file descriptors belong to files below the root.
std::atomic<bool> watched[1 << 16];

const char* text(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

long number(const char* name) { return atol(text(name)); }

// A relative path is below the root, where the program runs.
bool below(const char* path) {
    static const char* root = text("FAULT_ROOT");
    return path && (path[0] != '/' || (root[0] && strncmp(path, root, strlen(root)) == 0));
}

bool reads() {
    static const bool set = number("FAULT_READS") != 0;
    return set;
}

// Counts an operation, and says whether it fails.
bool counted() {
    static const long at = number("FAULT_AT");
    static const bool for_good = number("FAULT_FOR_GOOD") != 0;
    static const int error = static_cast<int>(number("FAULT_ERRNO"));
    static const int signal = static_cast<int>(number("FAULT_SIGNAL"));
    const long now = ++operations;
    if (signal > 0) {
        if (now == at) kill(getpid(), signal);
        return false;
    }
    if (at > 0 && (for_good ? now >= at : now == at)) {
        errno = error;
        return true;
    }
    return false;
}

bool fails() { return !reads() && counted(); }

bool is_watched(int fd) { return fd >= 0 && fd < (1 << 16) && watched[fd]; }

bool fails_on(int fd) { return is_watched(fd) && fails(); }

bool fails_to_read(int fd) { return reads() && is_watched(fd) && counted(); }

template <class F> F real(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_NEXT, name)); }

// Waits in front of the sync of a checkpoint's file as long as the disk is slow.
bool fails_to_sync(int fd) {
    static const char* hold = text("FAULT_HOLD");
    if (hold[0] && is_watched(fd)) {
        char name[4096];
        const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name, sizeof name - 1);
        name[length < 0 ? 0 : length] = 0;
        while (strstr(name, "-checkpoint-") && access(hold, F_OK) == 0) usleep(1000);
    }
    return fails_on(fd);
}

// The path from the root of the file system, of what a path in the folder `at` names.
std::string whole(int at, const char* path) {
    if (path[0] == '/') return path;
    std::string folder = text("FAULT_ROOT");
    if (at != AT_FDCWD) {
        char name[4096];
        const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(at)).c_str(), name, sizeof name);
        folder.assign(name, length < 0 ? 0 : static_cast<size_t>(length));
    }
    return folder + "/" + path;
}

// Whether a path is one that cannot be deleted.
bool keeps(const char* path) {
    static const std::string end = text("FAULT_KEEPS");
    if (end.empty() || !std::string(path).ends_with(end)) return false;
    errno = EACCES;
    return true;
}

// Appends an operation to the log.
void note(const char* name, int fd, const std::string& path, const std::string& to, const void* data, size_t size) {
    static const char* file = text("FAULT_LOG");
    if (!file[0]) return;
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> guard(one_at_a_time);
    static const int log = real<int (*)(const char*, int, ...)>("open64")(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    std::string record = std::string(name) + '|' + std::to_string(fd) + '|' + path + '|' + to + '|' + std::to_string(size) + '\n';
    if (data) record.append(static_cast<const char*>(data), size);
    static auto write = real<ssize_t (*)(int, const void*, size_t)>("write");
    if (write(log, record.data(), record.size()) != static_cast<ssize_t>(record.size())) abort();
}

int opened(int at, const char* path, int flags, mode_t mode) {
    const bool ours = below(path);
    const bool changes = flags & (O_WRONLY | O_RDWR | O_CREAT);
    if (ours && changes && fails()) return -1;
    if (ours && !changes && !(flags & O_DIRECTORY) && reads() && counted()) return -1;
    static auto call = real<int (*)(int, const char*, int, ...)>("openat64");
    const int fd = call(at, path, flags, mode);
    if (fd >= 0 && fd < (1 << 16)) watched[fd] = ours;
    if (fd >= 0 && ours) note((flags & O_TRUNC) ? "truncating" : "open", fd, whole(at, path), "", nullptr, 0);
    return fd;
}

// Notes what was done to a file, if it is watched and was done.
template <class R> R done(R result, const char* name, int fd, const void* data, size_t size) {
    const int error = errno;
    if (result >= 0 && is_watched(fd)) {
        // A write may write less than it was given.
        note(name, fd, "", "", data, data ? static_cast<size_t>(result) : size);
    }
    errno = error;
    return result;
}

__attribute__((destructor)) void report() {
    const char* file = text("FAULT_COUNT");
    if (!file[0]) return;
    char line[32];
    const int length = snprintf(line, sizeof line, "%ld\n", operations.load());
    const int fd = real<int (*)(const char*, int, ...)>("open64")(file, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (real<ssize_t (*)(int, const void*, size_t)>("write")(fd, line, static_cast<size_t>(length)) < 0) abort();
}

mode_t mode_of(int flags, va_list arguments) {
    return (flags & (O_CREAT | O_TMPFILE)) ? static_cast<mode_t>(va_arg(arguments, int)) : 0;
}

} // namespace

#define OPEN(NAME)                                                                                                       \
    int NAME(const char* path, int flags, ...) {                                                                         \
        va_list arguments;                                                                                               \
        va_start(arguments, flags);                                                                                      \
        const mode_t mode = mode_of(flags, arguments);                                                                   \
        va_end(arguments);                                                                                               \
        return opened(AT_FDCWD, path, flags, mode);                                                               \
    }

#define OPENAT(NAME)                                                                                                     \
    int NAME(int at, const char* path, int flags, ...) {                                                                 \
        va_list arguments;                                                                                               \
        va_start(arguments, flags);                                                                                      \
        const mode_t mode = mode_of(flags, arguments);                                                                   \
        va_end(arguments);                                                                                               \
        return opened(at, path, flags, mode);                                                                     \
    }

#define ON_FD(RESULT, NAME, PARAMETERS, ARGUMENTS, NOTE, DATA, SIZE, FAILS)                                              \
    RESULT NAME PARAMETERS {                                                                                             \
        if (FAILS(fd)) return -1;                                                                                        \
        static auto call = real<RESULT(*) PARAMETERS>(#NAME);                                                            \
        return done(call ARGUMENTS, NOTE, fd, DATA, static_cast<size_t>(SIZE));                                          \
    }

#define READING(NAME, PARAMETERS, ARGUMENTS)                                                                             \
    ssize_t NAME PARAMETERS {                                                                                            \
        if (fails_to_read(fd)) return -1;                                                                                \
        static auto call = real<ssize_t(*) PARAMETERS>(#NAME);                                                           \
        return call ARGUMENTS;                                                                                           \
    }

#define ON_PATH(NAME, PARAMETERS, ARGUMENTS, AT, TO, FAILS)                                                                   \
    int NAME PARAMETERS {                                                                                                \
        const bool ours = below(path);                                                                                   \
        if (ours && (fails() || FAILS)) return -1;                                                                       \
        const std::string place = ours ? whole(AT, path) : "";                                                           \
        static auto call = real<int(*) PARAMETERS>(#NAME);                                                               \
        const int result = call ARGUMENTS, error = errno;                                                                \
        if (result == 0 && ours) note(#NAME, -1, place, TO, nullptr, 0);                                                 \
        errno = error;                                                                                                   \
        return result;                                                                                                   \
    }

extern "C" {
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_FD(ssize_t, write, (int fd, const void* data, size_t size), (fd, data, size), "write", data, size, fails_on)
ON_FD(ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), (fd, data, size, at), "pwrite64", nullptr, 0, fails_on)
ON_FD(ssize_t, writev, (int fd, const struct iovec* data, int count), (fd, data, count), "writev", nullptr, 0, fails_on)
READING(read, (int fd, void* data, size_t size), (fd, data, size))
READING(pread64, (int fd, void* data, size_t size, off64_t at), (fd, data, size, at))
READING(readv, (int fd, const struct iovec* data, int count), (fd, data, count))
ON_FD(int, fsync, (int fd), (fd), "fsync", nullptr, 0, fails_to_sync)
ON_FD(int, fdatasync, (int fd), (fd), "fsync", nullptr, 0, fails_to_sync)
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size), "ftruncate64", nullptr, size, fails_on)
ON_PATH(mkdir, (const char* path, mode_t mode), (path, mode), AT_FDCWD, "", false)
ON_PATH(rmdir, (const char* path), (path), AT_FDCWD, "", keeps(path))
ON_PATH(unlink, (const char* path), (path), AT_FDCWD, "", keeps(path))
ON_PATH(unlinkat, (int at, const char* path, int flags), (at, path, flags), at, "", keeps(path))
ON_PATH(rename, (const char* path, const char* to), (path, to), AT_FDCWD, whole(AT_FDCWD, to), false)

ssize_t copy_file_range(int in, off64_t* from, int fd, off64_t* to, size_t size, unsigned flags) {
    if (fails_on(fd)) return -1;
    static auto call = real<ssize_t (*)(int, off64_t*, int, off64_t*, size_t, unsigned)>("copy_file_range");
    return done(call(in, from, fd, to, size, flags), "copy_file_range", fd, nullptr, 0);
}

int close(int fd) {
    if (fd >= 0 && fd < (1 << 16)) watched[fd] = false;
    static auto call = real<int (*)(int)>("close");
    return call(fd);
}
}
