/* Plans: the outputs that a remembered call allocates, and its launches. */

#include "launch.h"

#include <stdlib.h>

typedef struct {
    int position, model; /* model >= 0: like the tensor at that position, with the arguments replaced by it */
    PyObject *function, *arguments, *options; /* options is NULL if there are none */
} Make;

/* Further memory of launches. Unless they are captured, memory is kept, because launches on a stream run in sequence. */
typedef struct {
    PyObject *take, *arguments;
    PyObject *discard;  /* take() returns memory and a key for discard(); None: take(arguments) returns memory alone */
    int per_stream;     /* take() returns the same for a stream until it is discarded */
    Py_ssize_t shared;  /* bytes, if one launch uses it and nobody afterwards: calls on a stream share it; or 0 */
    PyObject *held;     /* what take() returned for `stream` in `period`, or NULL */
    void *stream;
    unsigned long period;
} Memory;

struct Plan {
    int makes, launches, sources, releases, device, threaded;
    size_t scratch;
    Make *make;
    Launch *launch;
    Memory source[MAX_SOURCES];
    PyObject *kept; /* owns the machine code */
};

/* Memory that was held in an earlier period is not used. */
static unsigned long period;

void forget_kept(void)
{
    period++;
}

void plan_free(Plan *plan)
{
    for (int i = 0; i < plan->makes; i++) {
        Py_XDECREF(plan->make[i].function);
        Py_XDECREF(plan->make[i].arguments);
        Py_XDECREF(plan->make[i].options);
    }
    for (int i = 0; i < plan->launches; i++)
        free_launch(&plan->launch[i]);
    for (int i = 0; i < plan->sources; i++) {
        Py_XDECREF(plan->source[i].take);
        Py_XDECREF(plan->source[i].discard);
        Py_XDECREF(plan->source[i].arguments);
        Py_XDECREF(plan->source[i].held);
    }
    Py_XDECREF(plan->kept);
    free(plan->make);
    free(plan->launch);
    free(plan);
}

int fail_limit(const char *what)
{
    PyErr_Format(PyExc_ValueError, "a plan has too many %s", what);
    return -1;
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
        Memory *source = &plan->source[i];
        if (!PyArg_ParseTuple(PyTuple_GetItem(sources, i), "OOO!pn", &source->take, &source->discard, &PyTuple_Type,
                              &source->arguments, &source->per_stream, &source->shared))
            return -1;
        Py_INCREF(source->take);
        Py_INCREF(source->discard);
        Py_INCREF(source->arguments);
        plan->sources++;
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

static int run_launches(const Plan *plan, const uintptr_t *bases, void *stream)
{
    int error = 0;
    if (plan->device >= 0) {
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

/* Memory that the calls on a stream share. A new stream takes the place of the one that came first. */
typedef struct {
    PyObject *memory;
    Py_ssize_t size;
    void *stream;
    int device;
} Shared;

enum { STREAMS = 8 };
static Shared shared[STREAMS];

/* Memory for launches on a stream, and afterwards for others: a new reference. */
static PyObject *shared_of(const Memory *source, int device, void *stream)
{
    static int next;
    Shared *own = NULL;
    for (int i = 0; i < STREAMS; i++)
        if (shared[i].memory != NULL && shared[i].device == device && shared[i].stream == stream)
            own = &shared[i];
    if (own == NULL || own->size < source->shared) {
        PyObject *taken = PyObject_Call(source->take, source->arguments, NULL);
        if (taken == NULL)
            return NULL;
        if (own == NULL) {
            own = &shared[next];
            next = (next + 1) % STREAMS;
        }
        PyObject *before = own->memory;
        *own = (Shared){taken, source->shared, stream, device};
        Py_XDECREF(before);
        Py_INCREF(taken);
        return taken;
    }
    Py_INCREF(own->memory);
    return own->memory;
}

/* What a source's take() returns, perhaps at an earlier call. A new reference. */
static PyObject *taken_from(Memory *source, int device, void *stream, int captured)
{
    if (source->shared && !captured)
        return shared_of(source, device, stream);
    int keeps = source->per_stream && !captured;
    if (keeps && source->held != NULL && source->stream == stream && source->period == period) {
        Py_INCREF(source->held);
        return source->held;
    }
    unsigned long now = period;
    PyObject *taken = PyObject_Call(source->take, source->arguments, NULL);
    if (taken != NULL && keeps) {
        Py_XDECREF(source->held);
        Py_INCREF(taken);
        source->held = taken;
        source->stream = stream;
        source->period = now;
    }
    return taken;
}

/* Take the memory of all sources, launch, and discard it if that fails. */
static int launch_with_sources(Plan *plan, uintptr_t *bases, int tensors, void *stream)
{
    PyObject *taken[MAX_SOURCES];
    int count = 0, status = 0, captured = plan->device < 0 || cuda_captures(stream);
    for (; count < plan->sources && status == 0; count++) {
        taken[count] = taken_from(&plan->source[count], plan->device, stream, captured);
        if (taken[count] == NULL) {
            status = -1;
            break;
        }
        int pair = plan->source[count].discard != Py_None; /* memory and the key to discard it */
        PyObject *memory = pair ? PyTuple_GetItem(taken[count], 0) : taken[count];
        status = memory == NULL ? -1 : address_of(memory, &bases[tensors + count]);
    }
    if (status == 0)
        status = run_launches(plan, bases, stream);
    for (int i = 0; i < count; i++) {
        if (status != 0 && plan->source[i].discard != Py_None) {
            PyObject *type, *value, *trace;
            PyErr_Fetch(&type, &value, &trace);
            PyObject *nothing =
                PyObject_CallFunctionObjArgs(plan->source[i].discard, PyTuple_GetItem(taken[i], 1), NULL);
            Py_XDECREF(nothing);
            forget_kept();
            PyErr_Restore(type, value, trace);
        }
        Py_DECREF(taken[i]);
    }
    return status;
}

PyObject *plan_run(Plan *plan, const Form *form, const Key *key)
{
    void *stream = NULL;
    if (plan->device >= 0) {
        if (cuda_device() != plan->device) /* a thread without a context, or with that of another device */
            return NULL;
        if (torch_.api->current_stream(DL_CUDA, plan->device, &stream) != 0)
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
        status = plan->sources ? launch_with_sources(plan, bases, count, stream) : run_launches(plan, bases, stream);
    for (int i = 0; i < count && status == 0; i++)
        if (key->versioned >> i & 1)
            status = bump_version(key->seen[i].object);
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
