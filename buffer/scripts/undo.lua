-- fence, then ticket, task and attempt in turn: groups whose training is not part of the recovered weights
-- -> how many of them had been spent, so that the server no longer holds them: they are counted, and their tasks are rolled again
local undone, next_ticket = 0, get('next_ticket', 0)
for index = 2, #ARGV, 3 do
  local id, record = ARGV[index], read(ARGV[index])
  local is_spent = not record or record.state == 'kept'
  local answer = call('HGET', ENDED, id) or 'already' -- "undone": by a recovery that did not finish
  if is_spent and answer == 'already' and ticket_number(id) < next_ticket then
    call('RPUSH', REDO, string.format('%d %d 0', ARGV[index + 1], ARGV[index + 2] + 1))
    call('HSET', ENDED, id, 'undone')
    undone = undone + 1
  end
end
if undone > 0 then -- an old server does not parse -0
  call('HINCRBY', STATE, 'spent', -undone)
  call('HINCRBY', STATE, 'lost_to_rollback', undone)
end
return undone
