// A driver that calls back, like one with a tool (CUPTI, compute-sanitizer) that has subscribed to its calls: before
// every call is executed, a callback on the same thread uses CUDA functions of every family. All other functions are
// those of the driver at REAL. EACH(X) lists its functions, by number.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

static const char *const names[] = {
#define NAME(number, name) #name,
    EACH(NAME)
};
#define COUNT (sizeof names / sizeof *names)
static void *table[COUNT];
// The families that a callback uses: a bit for each, as below.
static uint64_t families;
static uint64_t kernel;
static unsigned long callbacks;
static __thread int inside;

// If a lock is held while a callback needs it, the process would wait for ever; then it is ended.
void odd_callback(uint64_t to) { families = to; if (to) alarm(60); }
// Once: before the next release of a primary context, it is reset, with later allocations in it.
static int reset_at_release;
void odd_reset_at_release(uint64_t to) { reset_at_release = to; }
void odd_callback_kernel(uint64_t handle) { kernel = handle; }
unsigned long odd_callbacks(int unused) { return __atomic_load_n(&callbacks, __ATOMIC_RELAXED); }

typedef int (*call)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
typedef int (*launch)(uint64_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void *, void *);

// As a program finds it: the first loaded library of this name is in front of this one.
static call hooked(const char *name) { return (call)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name); }
#define CALL(name, ...) hooked(#name)(__VA_ARGS__)

static void callback(void) {
    uint64_t out[4], properties[11] = {1, 1}, at, bytes = 2 << 20, shape[3] = {256, 256, 0x20 | 1ull << 32};
#define FAMILY(number) if (families >> number & 1)
    FAMILY(0) if (!CALL(cuMemAlloc_v2, (uint64_t)out, 4096, 0, 0, 0, 0)) CALL(cuMemFree_v2, out[0], 0, 0, 0, 0, 0);
    FAMILY(1) if (!CALL(cuMemAllocAsync, (uint64_t)out, 4096, 0, 0, 0, 0)) CALL(cuMemFreeAsync, out[0], 0, 0, 0, 0, 0);
    FAMILY(2) CALL(cuCtxSynchronize, 0, 0, 0, 0, 0, 0);
    FAMILY(2) CALL(cuMemGetInfo_v2, (uint64_t)out, (uint64_t)(out + 1), 0, 0, 0, 0);
    FAMILY(3) if (!CALL(cuMemPoolCreate, (uint64_t)out, (uint64_t)properties, 0, 0, 0, 0)) {
        uint64_t pool = out[0];
        if (!CALL(cuMemAllocFromPoolAsync, (uint64_t)out, 4096, pool, 0, 0, 0)) CALL(cuMemFreeAsync, out[0], 0, 0, 0, 0, 0);
        CALL(cuMemPoolDestroy, pool, 0, 0, 0, 0, 0);
    }
    FAMILY(4) if (!CALL(cuMemCreate, (uint64_t)out, bytes, (uint64_t)properties, 0, 0, 0)) {
        uint64_t handle = out[0];
        CALL(cuMemAddressReserve, (uint64_t)&at, bytes, 0, 0, 0, 0);
        CALL(cuMemMap, at, bytes, 0, handle, 0, 0);
        CALL(cuMemRelease, handle, 0, 0, 0, 0, 0);
        CALL(cuMemUnmap, at, bytes, 0, 0, 0, 0);
        CALL(cuMemAddressFree, at, bytes, 0, 0, 0, 0);
    }
    FAMILY(5) if (!CALL(cuArrayCreate_v2, (uint64_t)out, (uint64_t)shape, 0, 0, 0, 0)) CALL(cuArrayDestroy, out[0], 0, 0, 0, 0, 0);
    FAMILY(6) CALL(cuCtxSetLimit, 2, 16 << 20, 0, 0, 0, 0);
    FAMILY(6) CALL(cuCtxSetLimit, 2, 8 << 20, 0, 0, 0, 0);
    FAMILY(7) if (!CALL(cuDevicePrimaryCtxRetain, (uint64_t)out, 0, 0, 0, 0, 0)) CALL(cuDevicePrimaryCtxRelease_v2, 0, 0, 0, 0, 0, 0);
    FAMILY(8) if (!CALL(cuCtxCreate_v2, (uint64_t)out, 0, 0, 0, 0, 0)) CALL(cuCtxDestroy_v2, out[0], 0, 0, 0, 0, 0);
    FAMILY(9) if (kernel) ((launch)hooked("cuLaunchKernel"))(kernel, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0);
}

__attribute__((used, visibility("hidden"))) void *enter(int number) {
    if (!table[number]) table[number] = dlsym(dlopen(REAL, RTLD_NOW | RTLD_LOCAL), names[number]);
    if (reset_at_release && !strcmp(names[number], "cuDevicePrimaryCtxRelease_v2")) {
        uint64_t out;
        reset_at_release = 0;
        CALL(cuMemAlloc_v2, (uint64_t)&out, 8 << 20, 0, 0, 0, 0);
        CALL(cuDevicePrimaryCtxReset_v2, 0, 0, 0, 0, 0, 0);
    }
    if (families && !inside) {
        inside = 1;
        __atomic_fetch_add(&callbacks, 1, __ATOMIC_RELAXED);
        callback();
        inside = 0;
    }
    return table[number];
}

#define STUB(number, name) \
    __asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n mov $" #number ", %eax\n jmp common\n");
EACH(STUB)
__asm__(
    "common:\n push %rbp\n mov %rsp, %rbp\n and $-16, %rsp\n sub $80, %rsp\n"
    " mov %rdi, (%rsp)\n mov %rsi, 8(%rsp)\n mov %rdx, 16(%rsp)\n mov %rcx, 24(%rsp)\n mov %r8, 32(%rsp)\n"
    " mov %r9, 40(%rsp)\n movaps %xmm0, 48(%rsp)\n"
    " mov %eax, %edi\n call enter\n mov %rax, %r11\n"
    " mov (%rsp), %rdi\n mov 8(%rsp), %rsi\n mov 16(%rsp), %rdx\n mov 24(%rsp), %rcx\n mov 32(%rsp), %r8\n"
    " mov 40(%rsp), %r9\n movaps 48(%rsp), %xmm0\n leave\n jmp *%r11\n");
