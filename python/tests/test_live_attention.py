"""Attention of caches in Python: classes with a method attend."""

import dataclasses

import numpy as np
import pytest
import toys

import kvtwin


def test_attention():
    result = kvtwin.fuzz(toys.Attends, operations=3000)
    assert result, str(result)
    assert result.level == "attention"
    result = kvtwin.fuzz(toys.AttendsToTooFew, operations=3000)
    assert not result
    assert "as if position 0 were missing" in result.failure
    assert result.findings[0].check == "subject: output"
    assert not kvtwin.run(toys.AttendsToTooFew, result.history)


def test_attention_beside_rows():
    """The rows are right, the attention is not."""

    class Both(toys.AttendsToTooFew):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, name="both")
        get = toys.Right.get

    result = kvtwin.fuzz(Both, operations=3000)
    assert not result and result.level == "visibility"
    assert result.findings[0].level == "attention"
    again = kvtwin.run(Both, result.history)
    assert not again and "as if position 0 were missing" in str(again)


def test_outputs_of_other_libraries():
    class Torch:
        """Has a dtype that numpy does not have, as bf16 in torch."""

        def __init__(self, numbers):
            self.numbers = numbers

        def __array__(self, *_args, **_more):
            raise TypeError("no such dtype")

        def detach(self):
            return self

        def float(self):
            return self

        def cpu(self):
            return self.numbers

    class WithDLPack:
        def __init__(self, numbers):
            self.__dlpack__ = numbers.__dlpack__
            self.__dlpack_device__ = numbers.__dlpack_device__

    for wrap in (Torch, WithDLPack):

        class Wraps(toys.Attends):
            def attend(self, layer, query):
                return wrap(super().attend(layer, query).astype("f4"))

        assert kvtwin.fuzz(Wraps, operations=1000)


def test_soft_caps_and_sinks():
    drawn = set()

    class Counts(toys.Attends):
        def attend(self, layer, query):
            drawn.update({self.setup.soft_cap, len(self.setup.sinks)})
            return super().attend(layer, query)

    assert kvtwin.fuzz(Counts, operations=5000)
    assert drawn > {0, 4, 8, 30}

    class WithoutCap(toys.Attends):
        def soft_cap(self):
            return 0

    class WithoutSinks(toys.Attends):
        def sinks(self):
            return ()

    wrong = kvtwin.fuzz(WithoutCap, operations=5000)
    assert "as if the soft cap were absent" in wrong.failure
    assert "softcap=4" in wrong.history
    wrong = kvtwin.fuzz(WithoutSinks, operations=5000)
    assert "as if the sinks were absent" in wrong.failure
    assert "sinks=1" in wrong.history

    class Rows(toys.Right):
        kvtwin = dataclasses.replace(toys.Right.kvtwin, can={"sinks"})

    with pytest.raises(TypeError, match="ability sinks, but has no method attend"):
        kvtwin.fuzz(Rows, operations=10)


def test_wrong_shapes_of_attention():
    class Flat(toys.Attends):
        def attend(self, layer, query):
            return super().attend(layer, query).ravel()

    assert "the output has shape" in kvtwin.fuzz(Flat, operations=1000).failure

    for shape in ((), (1,) * 5):

        class Zeros(toys.Attends):
            def attend(self, layer, query):
                return np.zeros(shape)

        failure = kvtwin.fuzz(Zeros, operations=1000).failure
        assert f"the output has shape {shape}, expected (1, " in failure

    class Neither(toys.Right):
        get = None

    with pytest.raises(TypeError, match="no method get"):
        kvtwin.fuzz(Neither, operations=10)
    with pytest.raises(ValueError, match="attend_dtype"):
        kvtwin.Description(name="x", attend_dtype="q8_0")
