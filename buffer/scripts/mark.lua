-- fence, step, next ticket of the position, mark -> tasks that ended untrained; tasks to roll again: the list, then those that
-- later tickets roll again
-- All at one moment: a task that waits to be rolled again, and is given to a worker meanwhile, stands in one of the two.
local lost = fence_lost(ARGV[1]) or step_lost(ARGV[2])
if lost then return lost end
even_when_full()
local MARKS_KEPT = 16
local ISSUED_MEANWHILE = 10000 -- more would mean that somebody else has written the number
local marks = { ARGV[4] }
for mark in string.gmatch(call('HGET', STATE, 'marks') or '', '%S+') do
  if #marks < MARKS_KEPT then marks[#marks + 1] = mark end
end
call('HSET', STATE, 'marks', table.concat(marks, ' '))
local tasks = call('LRANGE', REDO, 0, -1)
local first = tonumber(ARGV[3])
for later = 0, math.min(get('next_ticket', 0) - first - 1, ISSUED_MEANWHILE) do
  local record = read(ticket_id(first + later))
  if record and record.state ~= 'kept' and record.attempt > 1 then
    tasks[#tasks + 1] = string.format('%d %d %d', record.task, record.attempt, record.failures)
  end
end
return { get('untrained', 0), tasks }
