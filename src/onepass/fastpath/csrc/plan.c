/* Plans: the outputs that a remembered call allocates, and its launches. */

#include "native.h"

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

/* Cache lines for this many bytes, or NULL. */
static void *scratch_of(size_t size)
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

void set_driver(void *launch, void *get_device)
{
    *(void **)&cuda_launch = launch;
    *(void **)&cuda_get_device = get_device;
}

/* --- plans ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int word, base; /* bases: tensors by position, then sources, then scratch memory */
    int64_t offset;
} Patch;

typedef struct {
    int cuda, words, patches;
    /* CPU */
    void (*serial)(void *);
    void (*prepare)(void *);
    void (*parallel)(void *);
    void (*team)(void (*)(void *), void *, unsigned int, unsigned int);
    unsigned int threads;
    size_t scratch;
    /* CUDA */
    void *function;
    unsigned int grid, block, shared;
    int pdl, device;
    uint64_t *template;
    Patch *patch;
} Launch;

typedef struct {
    int position, model; /* model >= 0: like the tensor at that position, with the arguments replaced by it */
    PyObject *function, *arguments, *options; /* options is NULL if there are none */
} Make;

struct Plan {
    int makes, launches, sources, releases, device, threaded;
    size_t scratch;
    Make *make;
    Launch *launch;
    PyObject *take[MAX_SOURCES], *discard[MAX_SOURCES]; /* discard is None: take(template) is the memory */
    PyObject *template[MAX_SOURCES];
    PyObject *kept; /* owns the machine code */
};

void plan_free(Plan *plan)
{
    for (int i = 0; i < plan->makes; i++) {
        Py_XDECREF(plan->make[i].function);
        Py_XDECREF(plan->make[i].arguments);
        Py_XDECREF(plan->make[i].options);
    }
    for (int i = 0; i < plan->launches; i++) {
        free(plan->launch[i].template);
        free(plan->launch[i].patch);
    }
    for (int i = 0; i < plan->sources; i++) {
        Py_XDECREF(plan->take[i]);
        Py_XDECREF(plan->discard[i]);
        Py_XDECREF(plan->template[i]);
    }
    Py_XDECREF(plan->kept);
    free(plan->make);
    free(plan->launch);
    free(plan);
}

static int fail_limit(const char *what)
{
    PyErr_Format(PyExc_ValueError, "a plan has too many %s", what);
    return -1;
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

static int parse_launch(PyObject *description, Launch *launch, int bases)
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

static int parse(PyObject *description, const Form *form, Plan *plan)
{
    PyObject *makes, *launches, *sources, *kept;
    if (!PyArg_ParseTuple(description, "O!O!O!pO", &PyTuple_Type, &makes, &PyTuple_Type, &launches, &PyTuple_Type,
                          &sources, &plan->releases, &kept))
        return -1;
    Py_INCREF(kept);
    plan->kept = kept;
    int tensors = form->inputs + form->outputs;
    if (PyTuple_Size(makes) > form->outputs || PyTuple_Size(sources) > MAX_SOURCES)
        return fail_limit("allocations");
    if (PyTuple_Size(launches) > MAX_LAUNCHES)
        return fail_limit("launches");
    plan->make = calloc((size_t)PyTuple_Size(makes) + 1, sizeof(Make));
    plan->launch = calloc((size_t)PyTuple_Size(launches) + 1, sizeof(Launch));
    if (plan->make == NULL || plan->launch == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(makes); i++) {
        Make *make = &plan->make[plan->makes];
        if (!PyArg_ParseTuple(PyTuple_GetItem(makes, i), "iiOOO", &make->position, &make->model, &make->function,
                              &make->arguments, &make->options))
            return -1;
        Py_INCREF(make->function);
        Py_INCREF(make->arguments);
        Py_INCREF(make->options);
        if (make->options == Py_None) {
            Py_DECREF(make->options);
            make->options = NULL;
        }
        plan->makes++;
        if (make->position < form->inputs || make->position >= tensors || make->model >= tensors)
            return fail_limit("outputs");
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(sources); i++) {
        PyObject *take, *discard, *template;
        if (!PyArg_ParseTuple(PyTuple_GetItem(sources, i), "OOO", &take, &discard, &template))
            return -1;
        Py_INCREF(take);
        Py_INCREF(discard);
        Py_INCREF(template);
        plan->template[plan->sources] = template;
        plan->take[plan->sources] = take;
        plan->discard[plan->sources++] = discard;
    }
    plan->device = -1;
    for (Py_ssize_t i = 0; i < PyTuple_Size(launches); i++) {
        Launch *launch = &plan->launch[plan->launches++];
        if (parse_launch(PyTuple_GetItem(launches, i), launch, tensors + plan->sources + 1) != 0)
            return -1;
        if (launch->cuda)
            plan->device = launch->device;
        plan->threaded |= launch->threads > 1;
        if (launch->scratch > plan->scratch)
            plan->scratch = launch->scratch;
    }
    return 0;
}

Plan *plan_from(PyObject *description, const Form *form)
{
    Plan *plan = calloc(1, sizeof(Plan));
    if (plan == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (parse(description, form, plan) != 0) {
        plan_free(plan);
        return NULL;
    }
    return plan;
}

/* --- running --------------------------------------------------------------------------------------------------- */

static inline const uint64_t *filled(const Launch *launch, const uintptr_t *bases, uint64_t *words)
{
    memcpy(words, launch->template, sizeof(uint64_t) * (size_t)launch->words);
    for (int i = 0; i < launch->patches; i++) {
        const Patch *patch = &launch->patch[i];
        words[patch->word] = (uint64_t)(bases[patch->base] + (uintptr_t)patch->offset);
    }
    return words;
}

/* Without the GIL, if the plan releases it. Kernels count rows in their block, so each call has a copy. */
static void run_cpu(const Launch *launch, const uintptr_t *bases)
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

/* Without the GIL: CUDA waits while a queue is full. */
static int run_cuda(const Launch *launch, const uintptr_t *bases, void *stream)
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

static int run_launches(const Plan *plan, const uintptr_t *bases)
{
    int error = 0;
    if (plan->device >= 0) {
        void *stream = NULL;
        if (torch_.api->current_stream(DL_CUDA, plan->device, &stream) != 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS
        for (int i = 0; i < plan->launches && !error; i++)
            error = run_cuda(&plan->launch[i], bases, stream);
        Py_END_ALLOW_THREADS
        if (error) {
            PyObject *nothing = PyObject_CallFunction(torch_.fail, "i", error);
            Py_XDECREF(nothing);
            return -1;
        }
        return 0;
    }
    if (plan->releases) {
        Py_BEGIN_ALLOW_THREADS
        for (int i = 0; i < plan->launches; i++)
            run_cpu(&plan->launch[i], bases);
        Py_END_ALLOW_THREADS
    } else {
        for (int i = 0; i < plan->launches; i++)
            run_cpu(&plan->launch[i], bases);
    }
    return 0;
}

static int address_of(PyObject *tensor, uintptr_t *address)
{
    DLView view;
    if (torch_.api->view(tensor, &view) != 0)
        return -1;
    *address = (uintptr_t)view.data + view.byte_offset;
    return 0;
}

static PyObject *make_tensor(const Make *make, PyObject *const *tensors)
{
    if (make->model < 0)
        return PyObject_Call(make->function, make->arguments, make->options);
    if (make->options == NULL)
        return PyObject_CallFunctionObjArgs(make->function, tensors[make->model], NULL);
    PyObject *arguments = PyTuple_Pack(1, tensors[make->model]);
    if (arguments == NULL)
        return NULL;
    PyObject *made = PyObject_Call(make->function, arguments, make->options);
    Py_DECREF(arguments);
    return made;
}

/* Take the memory of all sources, launch, and discard it if that fails. */
static int launch_with_sources(const Plan *plan, uintptr_t *bases, int tensors)
{
    PyObject *taken[MAX_SOURCES];
    int count = 0, status = 0;
    for (; count < plan->sources && status == 0; count++) {
        int kept = plan->discard[count] != Py_None; /* memory and the key to discard it */
        taken[count] = kept ? PyObject_CallNoArgs(plan->take[count])
                            : PyObject_CallFunctionObjArgs(plan->take[count], plan->template[count], NULL);
        if (taken[count] == NULL) {
            status = -1;
            break;
        }
        PyObject *memory = kept ? PyTuple_GetItem(taken[count], 0) : taken[count];
        status = memory == NULL ? -1 : address_of(memory, &bases[tensors + count]);
    }
    if (status == 0)
        status = run_launches(plan, bases);
    for (int i = 0; i < count; i++) {
        if (status != 0 && plan->discard[i] != Py_None) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            PyObject *nothing =
                PyObject_CallFunctionObjArgs(plan->discard[i], PyTuple_GetItem(taken[i], 1), NULL);
            Py_XDECREF(nothing);
            PyErr_Restore(type, value, trace);
        }
        Py_DECREF(taken[i]);
    }
    return status;
}

PyObject *plan_run(const Plan *plan, const Form *form, const Key *key)
{
    if (plan->device >= 0) { /* a thread without a context, or with that of another device */
        int device;
        if (cuda_launch == NULL || cuda_get_device(&device) != 0 || device != plan->device)
            return NULL;
    } else if (plan->threaded && forked) { /* torch's threads do not exist in this process */
        return NULL;
    }
    int count = form->inputs + form->outputs, status = 0;
    uintptr_t bases[MAX_TENSORS + MAX_SOURCES + 1];
    PyObject *tensors[MAX_TENSORS];
    for (int i = 0; i < count; i++) {
        bases[i] = key->seen[i].start;
        tensors[i] = key->seen[i].object;
    }
    if (plan->scratch) {
        bases[count + plan->sources] = (uintptr_t)scratch_of(plan->scratch);
        if (bases[count + plan->sources] == 0)
            return PyErr_NoMemory();
    }
    int made = 0;
    for (; made < plan->makes && status == 0; made++) {
        const Make *make = &plan->make[made];
        tensors[make->position] = make_tensor(make, tensors);
        if (tensors[make->position] == NULL) {
            status = -1;
            break;
        }
        status = address_of(tensors[make->position], &bases[make->position]);
    }
    if (status == 0)
        status = plan->sources ? launch_with_sources(plan, bases, count) : run_launches(plan, bases);
    PyObject *results = status == 0 ? PyTuple_New(form->outputs) : NULL;
    if (results != NULL) {
        for (int i = 0; i < form->outputs; i++) {
            PyObject *out = tensors[form->inputs + i];
            out = out == NULL ? Py_None : out;
            Py_INCREF(out);
            PyTuple_SetItem(results, i, out);
        }
    }
    for (int i = 0; i < made; i++)
        Py_DECREF(tensors[plan->make[i].position]);
    return results;
}
