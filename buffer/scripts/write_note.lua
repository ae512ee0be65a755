-- the learner's fence, milliseconds until the note expires, its text
if call('HGET', LEARNER, 'fence') ~= ARGV[1] then return end
call('DEL', NOTE) -- a full server accepts writes that follow a deletion
call('SET', NOTE, ARGV[3], 'PX', ARGV[2])
