/* What is asked of torch, and told. */

#include "native.h"

Torch torch_;
Direct direct;

/* --- tensors --------------------------------------------------------------------------------------------------- */

/* Whether a function of Python, of a tensor or of nothing (NULL), says so. */
static int says(PyObject *function, PyObject *tensor)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(function, tensor, NULL);
    if (answer == NULL)
        return -1;
    int yes = answer != Py_False;
    Py_DECREF(answer);
    return yes;
}

static inline const void *tensor_of(PyObject *object)
{
    return (const char *)object + direct.place;
}

int is_negated(PyObject *object)
{
    return direct.is_neg != NULL ? direct.is_neg(tensor_of(object)) : says(torch_.is_neg, object);
}

int is_inference(PyObject *object)
{
    return direct.is_inference != NULL ? direct.is_inference(tensor_of(object)) : says(torch_.is_inference, object);
}

int bump_version(PyObject *object)
{
    if (direct.bump_version == NULL)
        return says(torch_.bump_version, object) < 0 ? -1 : 0;
    direct.bump_version(tensor_of(object));
    return 0;
}

int in_inference_mode(void)
{
    return says(torch_.inference_mode, NULL);
}

int requires_grad(PyObject *tensor)
{
    PyObject *answer = PyObject_GetAttr(tensor, torch_.requires_grad);
    if (answer == NULL)
        return -1;
    int required = answer != Py_False;
    Py_DECREF(answer);
    return required;
}

/* --- interception ---------------------------------------------------------------------------------------------- */

/* Whether a function returns 0. */
static int counts_none(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    if (answer == NULL)
        return 0;
    int none = PyLong_AsLong(answer) == 0;
    Py_DECREF(answer);
    return none;
}

static int answers_none(PyObject *function)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    if (answer == NULL)
        return 0;
    Py_DECREF(answer);
    return answer == Py_None;
}

int is_plain(void)
{
    if (!counts_none(torch_.dispatch_modes) || !counts_none(torch_.function_modes))
        return 0;
    if (!answers_none(torch_.transforms) || !answers_none(torch_.tracing))
        return 0;
    PyObject *level = PyDict_GetItemWithError(torch_.dual, torch_.dual_level);
    return level != NULL && PyLong_AsLong(level) < 0;
}

int debugging(void)
{
    PyObject *value = PyDict_GetItemWithError(torch_.environment, torch_.debug_name);
    return value != NULL && PyObject_RichCompareBool(value, torch_.debug_on, Py_EQ) != 0;
}

int grad_mode(void)
{
    return says(torch_.grad_enabled, NULL);
}

/* --- events of a profile --------------------------------------------------------------------------------------- */

int profiling(void)
{
    return PyDict_GetItemWithError(torch_.profiler, torch_.profiling) == Py_True;
}

PyObject *begin_event(const Form *form, const Key *key, PyObject *name)
{
    PyObject *inputs = PyList_New(0);
    for (int i = 0; inputs != NULL && i < form->inputs; i++) {
        if (key->seen[i].object != NULL && PyList_Append(inputs, key->seen[i].object) != 0)
            Py_CLEAR(inputs);
    }
    PyObject *event = inputs == NULL ? NULL : PyObject_CallFunctionObjArgs(torch_.event, name, inputs, NULL);
    Py_XDECREF(inputs);
    PyObject *nothing = event == NULL ? NULL : PyObject_CallMethod(event, "__enter__", NULL);
    if (nothing == NULL)
        Py_CLEAR(event);
    Py_XDECREF(nothing);
    return event;
}

void end_event(PyObject *event)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *nothing = PyObject_CallMethod(event, "__exit__", "OOO", Py_None, Py_None, Py_None);
    Py_XDECREF(nothing);
    Py_DECREF(event);
    PyErr_Restore(type, value, trace);
}
