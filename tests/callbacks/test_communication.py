"""The hook by which a module tells of its forward pass under DDP."""

import copy
import pickle
import threading

from torch import nn

from batchscope.callbacks._communication import _Hook


def test_a_module_with_the_hook_is_copied_and_pickled_without_what_measures_it() -> None:
    module, called, lock = nn.BatchNorm1d(2), [], threading.Lock()  # a lock is copied no more than a CUDA event
    handle = module.register_forward_pre_hook(_Hook(lambda: called.append(lock)))
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.eval()(module.weight.detach()[None])
    assert called == []
    module.eval()(module.weight.detach()[None])
    assert called == [lock]
    handle.remove()
    assert not module._forward_pre_hooks
