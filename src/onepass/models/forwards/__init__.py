"""The forwards that `onepass.patch` installs: one per kind of module, none per model, for prompts and decode steps.

Each is a function of the module that it is bound to and of the record in the module's ``_onepass``. It has the signature
of the forward that it replaces, and runs the same projections, caches and attention functions in the same order.

A fused launch does the work of several modules without calling them. Such a call may matter: the module may have a hook,
or it or its forward may have been replaced after `patch`. So each forward first checks the modules that it would skip. If
one of them is not as `patch` left it, they are called one by one as in the unpatched model. This is decided at every call,
because hooks can be added and removed.

With ``decode=True`` the records of layers, attentions and MLPs also have the projections of a step of few tokens, and
each forward decides in its first lines whether a call is such a step.
"""
