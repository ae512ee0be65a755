-- A commit finds no memory: delete the oldest kept groups and tell the learner to save a checkpoint -> groups deleted
even_when_full()
call('HSET', STATE, 'starving', 1)
local oldest = call('ZRANGE', KEPT, 0, AT_ONCE - 1)
expire(oldest)
return #oldest
