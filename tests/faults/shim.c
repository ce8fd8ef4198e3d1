/* A disk that fails: preloaded, it counts the calls of libc that touch files below one folder, and fails, shortens or delays them.
 *
 * shim.py compiles it and arms it from within the process (fault_root, fault_arm). Calls that Python and torch do not make are not
 * here; neither are pages of a mapping, which the kernel reads by itself.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { OPEN, CREATE, WRITE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, LINK, CLOSE, READ, OPENDIR, STAT, FLOCK, READDIR, FSTAT, ADVISE, MAP, READLINK, SEEK, DUP, KINDS };
static const char *const NAMES[KINDS] = {"open",     "create", "write", "fsync", "rename",  "unlink", "mkdir", "rmdir",
                                         "truncate", "link",   "close", "read",  "opendir", "stat",   "flock", "readdir", "fstat",
                                         "advise",   "map",    "readlink", "seek", "dup"};
enum mode { FAIL, SHORT, SLEEP };
enum verdict { GO_ON, FAILED, HALF };

static char root[PATH_MAX], last[PATH_MAX + 64];
static size_t root_length;
static volatile long first, count, seen, hits;
static volatile int number, mode, pause_ms;
static volatile unsigned mask;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned parsed(const char *names) {
    unsigned found = 0;
    char copy[256], *rest = copy;
    snprintf(copy, sizeof copy, "%s", names);
    for (char *name = strtok_r(copy, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        for (int kind = 0; kind < KINDS; kind++)
            if (!strcmp(name, NAMES[kind])) found |= 1u << kind;
    return found;
}

void fault_root(const char *path) {
    snprintf(root, sizeof root, "%s", path);
    root_length = strlen(root);
}

/* The calls from `from` on (1 is the next one; 0: only count), `many` of them (-1: all). */
void fault_arm(long from, long many, int error, const char *names, int how, int ms) {
    pthread_mutex_lock(&lock);
    mask = parsed(names), count = many, number = error, mode = how, pause_ms = ms, seen = hits = 0, last[0] = 0, first = from;
    pthread_mutex_unlock(&lock);
}
long fault_seen(void) { return seen; }
long fault_hits(void) { return hits; }
const char *fault_last(void) { return last; }

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return 1;
}

static int whole(int dir, const char *path, char *out) {
    if (!root_length || !path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return below(out);
    }
    if (dir == AT_FDCWD ? syscall(SYS_getcwd, out, PATH_MAX - 1) < 0 : !path_of(dir, out)) return 0;
    size_t length = strlen(out);
    if (length + strlen(path) + 2 >= PATH_MAX) return 0;
    snprintf(out + length, PATH_MAX - length, "/%s", path);
    return below(out);
}

static int opened(int fd, char *out) { return root_length && path_of(fd, out) && below(out); }

static enum verdict met(enum kind kind, const char *path) {
    if (!(mask >> kind & 1)) return GO_ON;
    long at = __sync_add_and_fetch(&seen, 1);
    if (first <= 0 || at < first || (count >= 0 && at >= first + count)) return GO_ON;
    __sync_add_and_fetch(&hits, 1);
    if (!last[0]) snprintf(last, sizeof last, "%s %s", NAMES[kind], path + root_length);
    if (mode == SLEEP) {
        struct timespec time = {pause_ms / 1000, pause_ms % 1000 * 1000000L};
        nanosleep(&time, NULL);
        return GO_ON;
    }
    if (mode == SHORT) return kind == WRITE ? HALF : GO_ON;
    errno = number;
    return FAILED;
}

static int do_open(int dir, const char *path, int flags, mode_t bits) {
    char where[PATH_MAX];
    if (whole(dir, path, where) && met(flags & O_CREAT ? CREATE : OPEN, where)) return -1;
    return (int)syscall(SYS_openat, dir, path, flags, bits);
}
#define BITS \
    mode_t bits = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        bits = va_arg(rest, mode_t); \
        va_end(rest); \
    }
int open(const char *path, int flags, ...) { BITS return do_open(AT_FDCWD, path, flags, bits); }
int open64(const char *path, int flags, ...) { BITS return do_open(AT_FDCWD, path, flags | O_LARGEFILE, bits); }
int openat(int dir, const char *path, int flags, ...) { BITS return do_open(dir, path, flags, bits); }
int openat64(int dir, const char *path, int flags, ...) { BITS return do_open(dir, path, flags | O_LARGEFILE, bits); }

static enum verdict writing(int fd) {
    char where[PATH_MAX];
    return opened(fd, where) ? met(WRITE, where) : GO_ON;
}
static size_t shortened(enum verdict found, size_t size) { return found == HALF && size > 1 ? size / 2 : size; }
ssize_t write(int fd, const void *data, size_t size) {
    enum verdict found = writing(fd);
    return found == FAILED ? -1 : syscall(SYS_write, fd, data, shortened(found, size));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    enum verdict found = writing(fd);
    return found == FAILED ? -1 : syscall(SYS_pwrite64, fd, data, shortened(found, size), at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }

static int fails(enum kind kind, int fd) {
    char where[PATH_MAX];
    return mask >> kind & 1 && opened(fd, where) && met(kind, where);
}
ssize_t read(int fd, void *data, size_t size) { return fails(READ, fd) ? -1 : syscall(SYS_read, fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { return fails(READ, fd) ? -1 : syscall(SYS_pread64, fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { return pread(fd, data, size, at); }
ssize_t preadv(int fd, const struct iovec *data, int many, off_t at) {
    return fails(READ, fd) ? -1 : syscall(SYS_preadv, fd, data, many, (long)at, 0L);
}
ssize_t preadv64(int fd, const struct iovec *data, int many, off64_t at) { return preadv(fd, data, many, at); }
ssize_t preadv64v2(int fd, const struct iovec *data, int many, off64_t at, int flags) { /* what Python's os.preadv calls */
    return fails(READ, fd) ? -1 : syscall(SYS_preadv2, fd, data, many, (long)at, 0L, flags);
}
off64_t lseek64(int fd, off64_t at, int how) { return fails(SEEK, fd) ? -1 : syscall(SYS_lseek, fd, at, how); }
int posix_fadvise64(int fd, off64_t at, off64_t size, int advice) { /* returns its error */
    return fails(ADVISE, fd) ? errno : syscall(SYS_fadvise64, fd, at, size, advice) ? errno : 0;
}
void *mmap64(void *at, size_t size, int rights, int flags, int fd, off64_t from) {
    return fd >= 0 && fails(MAP, fd) ? MAP_FAILED : (void *)syscall(SYS_mmap, at, size, rights, flags, fd, from);
}
int fcntl64(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    long value = va_arg(rest, long);
    va_end(rest);
    return (what == F_DUPFD || what == F_DUPFD_CLOEXEC) && fails(DUP, fd) ? -1 : (int)syscall(SYS_fcntl, fd, what, value);
}
int flock(int fd, int how) { return fails(FLOCK, fd) ? -1 : (int)syscall(SYS_flock, fd, how); }

int fsync(int fd) { return fails(FSYNC, fd) ? -1 : (int)syscall(SYS_fsync, fd); }
int fdatasync(int fd) { return fails(FSYNC, fd) ? -1 : (int)syscall(SYS_fdatasync, fd); }
int ftruncate(int fd, off_t size) { return fails(TRUNCATE, fd) ? -1 : (int)syscall(SYS_ftruncate, fd, size); }
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int close(int fd) { /* of a file, whose last bytes could not be written; the descriptor is free in any case, as on Linux */
    struct stat facts;
    int failed = !syscall(SYS_fstat, fd, &facts) && S_ISREG(facts.st_mode) && fails(CLOSE, fd), error = errno;
    int done = (int)syscall(SYS_close, fd);
    if (failed) errno = error;
    return failed ? -1 : done;
}

static int refused(enum kind kind, int dir, const char *path) {
    char where[PATH_MAX];
    return whole(dir, path, where) && met(kind, where);
}
int renameat2(int dir, const char *from, int to_dir, const char *to, unsigned flags) {
    return refused(RENAME, dir, from) ? -1 : (int)syscall(SYS_renameat2, dir, from, to_dir, to, flags);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int dir, const char *from, int to_dir, const char *to) { return renameat2(dir, from, to_dir, to, 0); }

int unlinkat(int dir, const char *path, int flags) {
    return refused(flags & AT_REMOVEDIR ? RMDIR : UNLINK, dir, path) ? -1 : (int)syscall(SYS_unlinkat, dir, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dir, const char *path, mode_t bits) {
    return refused(MKDIR, dir, path) ? -1 : (int)syscall(SYS_mkdirat, dir, path, bits);
}
int mkdir(const char *path, mode_t bits) { return mkdirat(AT_FDCWD, path, bits); }

int linkat(int dir, const char *from, int to_dir, const char *to, int flags) {
    return refused(LINK, to_dir, to) ? -1 : (int)syscall(SYS_linkat, dir, from, to_dir, to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

ssize_t readlink(const char *path, char *out, size_t size) { /* of a descriptor's name below /proc as well */
    char where[PATH_MAX];
    long length = syscall(SYS_readlinkat, AT_FDCWD, path, where, sizeof where - 1);
    if (length > 0 && mask >> READLINK & 1) {
        where[length] = 0;
        if (root_length && below(where) && met(READLINK, where)) return -1;
    }
    return syscall(SYS_readlinkat, AT_FDCWD, path, out, size);
}

long syscall(long number, ...) { /* openat2, for which libc has no name; all others go through as they are */
    static long (*real)(long, ...);
    va_list rest;
    va_start(rest, number);
    long it[6];
    for (int at = 0; at < 6; at++) it[at] = va_arg(rest, long);
    va_end(rest);
    if (!real) real = dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_openat2 && mask >> OPEN & 1 && refused(OPEN, (int)it[0], (const char *)it[1])) return -1;
    return real(number, it[0], it[1], it[2], it[3], it[4], it[5]);
}

DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    if (refused(OPENDIR, AT_FDCWD, path)) return NULL;
    if (!real) real = dlsym(RTLD_NEXT, "opendir");
    return real(path);
}
DIR *fdopendir(int fd) {
    static DIR *(*real)(int);
    if (fails(OPENDIR, fd)) return NULL;
    if (!real) real = dlsym(RTLD_NEXT, "fdopendir");
    return real(fd);
}

struct dirent64 *readdir64(DIR *dir) {
    static struct dirent64 *(*real)(DIR *);
    if (fails(READDIR, dirfd(dir))) return NULL;
    if (!real) real = dlsym(RTLD_NEXT, "readdir64");
    return real(dir);
}
struct dirent *readdir(DIR *dir) { return (struct dirent *)readdir64(dir); }

int fstat(int fd, struct stat *out) { return fails(FSTAT, fd) ? -1 : (int)syscall(SYS_fstat, fd, out); }
int fstat64(int fd, struct stat64 *out) { return fstat(fd, (struct stat *)out); }

static int do_stat(int dir, const char *path, struct stat *out, int flags) {
    return mask >> STAT & 1 && refused(STAT, dir, path) ? -1 : (int)syscall(SYS_newfstatat, dir, path, out, flags);
}
int stat(const char *path, struct stat *out) { return do_stat(AT_FDCWD, path, out, 0); }
int lstat(const char *path, struct stat *out) { return do_stat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int fstatat(int dir, const char *path, struct stat *out, int flags) { return do_stat(dir, path, out, flags); }
int stat64(const char *path, struct stat64 *out) { return do_stat(AT_FDCWD, path, (struct stat *)out, 0); }
int lstat64(const char *path, struct stat64 *out) { return do_stat(AT_FDCWD, path, (struct stat *)out, AT_SYMLINK_NOFOLLOW); }
int fstatat64(int dir, const char *path, struct stat64 *out, int flags) {
    return do_stat(dir, path, (struct stat *)out, flags);
}
