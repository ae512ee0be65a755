-- the learner's fence, milliseconds until the note expires, what it says
if call('HGET', LEARNER, 'fence') ~= ARGV[1] then return end
call('DEL', NOTE) -- a full server lets what follows a deletion pass
call('SET', NOTE, ARGV[3], 'PX', ARGV[2])
