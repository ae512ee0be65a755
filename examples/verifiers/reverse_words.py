"""A taskset of verifiers as its authors would write it: say a word backwards."""

import random

import verifiers.v1 as vf

__all__ = ["ReverseWords"]


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State]):
    @vf.reward
    async def exact(self, task: WordData, trace: vf.Trace) -> float:
        return float(said(trace) == task.answer)

    @vf.reward(weight=0.2)
    async def right_length(self, task: WordData, trace: vf.Trace) -> float:
        return float(len(said(trace)) == len(task.answer))


class ReverseWords(vf.Taskset[WordTask]):
    def load(self):
        chance = random.Random(0)
        for _ in range(100):
            word = "".join(chance.choices("abc", k=4))
            yield WordTask(WordData(prompt=f"{word}=", system_prompt="Backwards.", answer=word[::-1]), self.config.task)


def said(trace: vf.Trace) -> str:
    return (trace.last_reply or "").strip()
