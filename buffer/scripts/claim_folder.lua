-- fence, token of the learner's folder of payload files ("" for none)
call('HSET', STATE, 'folder', ARGV[2])
