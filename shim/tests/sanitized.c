// Allocates ARGV[1] bytes of the GPU, then one byte more, and prints both results. With a second argument it then writes
// behind a heap allocation. A thread, the heap and arithmetic give each sanitizer something to instrument.
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static void *cuda;

static void *first_context(void *context) {
    int (*init)(unsigned) = dlsym(cuda, "cuInit");
    int (*create)(void **, unsigned, int) = dlsym(cuda, "cuCtxCreate_v2");
    int code = init(0);
    return (void *)(long)(code ? code : create(context, 0, 0));
}

int main(int count, char **arguments) {
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) return puts(dlerror()), 1;
    pthread_t thread;
    void *context = NULL, *code = NULL;
    pthread_create(&thread, NULL, first_context, &context);
    pthread_join(thread, &code);
    if (code) return printf("no context: %ld\n", (long)code), 1;
    int (*current)(void *) = dlsym(cuda, "cuCtxSetCurrent");
    int (*allocate)(unsigned long long *, size_t) = dlsym(cuda, "cuMemAlloc_v2");
    unsigned long long *at = malloc(2 * sizeof *at);
    if (current(context)) return 1;
    int all = allocate(at, strtoul(arguments[1], NULL, 10)), more = allocate(at + 1, 1);
    printf("%d %d\n", all, more);
    fflush(stdout);
    if (count > 2) at[count - 1] = 0;
    free(at);
    return 0;
}
