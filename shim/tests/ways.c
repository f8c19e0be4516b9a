// A program that loads the driver in one of several ways, and prints how much memory it sees.
// usage: ways WAY, one of those below
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*init)(unsigned);
typedef int (*create)(void **, unsigned, int);
typedef int (*info)(size_t *, size_t *);

static void *driver;
static void *by_name(const char *name) { return dlsym(driver, name); }
static void *by_version(const char *name) { return dlvsym(driver, name, "LIBCUDA_1"); }
static void *by_next(const char *name) { return dlsym(RTLD_NEXT, name); }
static void *by_default(const char *name) { return dlsym(RTLD_DEFAULT, name); }
// The result of the cuGetProcAddress that the first look-up returned.
static void *by_address(const char *name) {
    int (*ask)(const char *, void **, int, unsigned long, int *) = dlsym(driver, "cuGetProcAddress_v2");
    void *found = NULL;
    return ask(name, &found, 12000, 0, NULL) ? NULL : found;
}

int main(int count, char **arguments) {
    const char *way = arguments[1];
    void *(*find)(const char *) = by_name;
    int flags = RTLD_NOW;
    if (!strcmp(way, "version")) find = by_version;
    if (!strcmp(way, "next")) find = by_next;
    if (!strcmp(way, "default")) find = by_default;
    if (!strcmp(way, "address")) find = by_address;
    if (!strcmp(way, "deepbind")) flags |= RTLD_DEEPBIND;
    if (!strcmp(way, "namespace")) driver = dlmopen(LM_ID_NEWLM, "libcuda.so.1", flags);
    else driver = dlopen(!strcmp(way, "unversioned") ? "libcuda.so" : "libcuda.so.1", flags);
    if (!driver) { puts(dlerror()); return 1; }
    // What is looked up behind the caller twice is there twice.
    void *first = dlsym(RTLD_NEXT, "malloc"), *second = dlsym(RTLD_NEXT, "malloc");
    if (first != second || (!first && strcmp(way, "static"))) { printf("malloc is at %p, then at %p\n", first, second); return 1; }
    int full = find == by_address;
    init start = find("cuInit");
    create make = find(full ? "cuCtxCreate" : "cuCtxCreate_v2");
    info ask = find(full ? "cuMemGetInfo" : "cuMemGetInfo_v2");
    if (!start || !make || !ask) { puts("not found"); return 1; }
    void *context;
    size_t free, total;
    int code = start(0);
    if (code) return code;
    make(&context, 0, 0);
    ask(&free, &total);
    printf("%zu\n", total);
    return 0;
}
