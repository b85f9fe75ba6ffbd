/* Launches, and what they need: scratch memory of the calling thread, and CUDA's functions. */

#include "launch.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

int forked;

/* --- scratch memory of the calling thread, which kernels on a CPU use; it never shrinks ------------------------- */

typedef struct {
    size_t size; /* bytes */
    void *at;
} Scratch;

static pthread_key_t scratch_key;
static _Thread_local Scratch *scratch;

static void free_scratch(void *memory)
{
    free(((Scratch *)memory)->at);
    free(memory);
}

static void after_fork(void)
{
    forked = 1;
}

int init_scratch(void)
{
    return pthread_key_create(&scratch_key, free_scratch) || pthread_atfork(NULL, NULL, after_fork);
}

void *scratch_of(size_t size)
{
    if (scratch == NULL) {
        scratch = calloc(1, sizeof(Scratch));
        if (scratch == NULL || pthread_setspecific(scratch_key, scratch) != 0)
            return NULL;
    }
    if (scratch->size < size) {
        free(scratch->at);
        scratch->size = 0;
        size_t rounded = (size + 63) / 64 * 64;
        if (posix_memalign(&scratch->at, 64, rounded) != 0) {
            scratch->at = NULL;
            return NULL;
        }
        scratch->size = rounded;
    }
    return scratch->at;
}

/* --- CUDA's launch function ------------------------------------------------------------------------------------ */

typedef struct {
    int id, pad, value;
    char rest[60];
} Attribute; /* CUlaunchAttribute */

typedef struct {
    unsigned int grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned int count;
} Config; /* CUlaunchConfig */

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

static int (*cuda_launch)(const Config *, void *function, void **arguments, void **extra);
static int (*cuda_get_device)(int *device);
static int (*cuda_is_capturing)(void *stream, int *status);

void set_driver(void *launch, void *get_device, void *is_capturing)
{
    *(void **)&cuda_launch = launch;
    *(void **)&cuda_get_device = get_device;
    *(void **)&cuda_is_capturing = is_capturing;
}

int cuda_device(void)
{
    int device;
    return cuda_launch == NULL || cuda_get_device(&device) != 0 ? -1 : device;
}

int cuda_captures(void *stream)
{
    int status;
    return cuda_is_capturing == NULL || cuda_is_capturing(stream, &status) != 0 || status != 0;
}

/* --- launches -------------------------------------------------------------------------------------------------- */

void free_launch(Launch *launch)
{
    free(launch->template);
    free(launch->patch);
}

/* (serial, prepare, parallel, team, threads, scratch bytes) or (function, grid, block, shared, pdl, device). */
static int parse_head(PyObject *head, Launch *launch)
{
    unsigned long long first, second, third, fourth, size;
    if (!launch->cuda) {
        if (!PyArg_ParseTuple(head, "KKKKIK", &first, &second, &third, &fourth, &launch->threads, &size))
            return -1;
        launch->serial = (void (*)(void *))(uintptr_t)first;
        launch->prepare = (void (*)(void *))(uintptr_t)second;
        launch->parallel = (void (*)(void *))(uintptr_t)third;
        launch->team = (void (*)(void (*)(void *), void *, unsigned int, unsigned int))(uintptr_t)fourth;
        launch->scratch = (size_t)size;
        return 0;
    }
    if (!PyArg_ParseTuple(head, "KIIIpi", &first, &launch->grid, &launch->block, &launch->shared, &launch->pdl,
                          &launch->device))
        return -1;
    launch->function = (void *)(uintptr_t)first;
    return 0;
}

int parse_launch(PyObject *description, Launch *launch, int bases)
{
    PyObject *head, *patches;
    const char *words;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(description, "pO!y#O!", &launch->cuda, &PyTuple_Type, &head, &words, &size, &PyTuple_Type,
                          &patches))
        return -1;
    if (parse_head(head, launch) != 0)
        return -1;
    if (size > MAX_WORDS * 8 || size % 8)
        return fail_limit("words");
    launch->words = (int)(size / 8);
    launch->patches = (int)PyTuple_Size(patches);
    launch->template = malloc((size_t)size + 8);
    launch->patch = malloc(sizeof(Patch) * (size_t)(launch->patches + 1));
    if (launch->template == NULL || launch->patch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(launch->template, words, (size_t)size);
    for (int i = 0; i < launch->patches; i++) {
        Patch *patch = &launch->patch[i];
        long long offset;
        if (!PyArg_ParseTuple(PyTuple_GetItem(patches, i), "iiL", &patch->word, &patch->base, &offset))
            return -1;
        patch->offset = offset;
        if (patch->word < 0 || patch->word >= launch->words || patch->base < 0 || patch->base >= bases)
            return fail_limit("addresses");
    }
    return 0;
}

static inline const uint64_t *filled(const Launch *launch, const uintptr_t *bases, uint64_t *words)
{
    memcpy(words, launch->template, sizeof(uint64_t) * (size_t)launch->words);
    for (int i = 0; i < launch->patches; i++) {
        const Patch *patch = &launch->patch[i];
        words[patch->word] = (uint64_t)(bases[patch->base] + (uintptr_t)patch->offset);
    }
    return words;
}

/* Kernels count rows in their block, so each call has a copy. */
void run_cpu(const Launch *launch, const uintptr_t *bases)
{
    uint64_t words[MAX_WORDS];
    filled(launch, bases, words);
    if (launch->threads <= 1) {
        launch->serial(words);
        return;
    }
    if (launch->prepare != NULL)
        launch->prepare(words);
    launch->team(launch->parallel, words, launch->threads, 0);
}

int run_cuda(const Launch *launch, const uintptr_t *bases, void *stream)
{
    uint64_t words[MAX_WORDS];
    void *arguments[MAX_WORDS];
    filled(launch, bases, words);
    for (int i = 0; i < launch->words; i++)
        arguments[i] = &words[i];
    Attribute attribute = {PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1, {0}};
    Config config = {
        {launch->grid, 1, 1}, {launch->block, 1, 1}, launch->shared, stream, launch->pdl ? &attribute : NULL,
        launch->pdl ? 1 : 0,
    };
    return cuda_launch(&config, launch->function, arguments, NULL);
}
