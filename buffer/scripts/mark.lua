-- fence, step, next ticket of the position, mark -> number of tasks that ended untrained; tasks to roll again: those that wait,
-- then those of tickets issued since the position. Both in one script: a task that gets a ticket meanwhile is in one of them.
local lost_steps = step_lost(ARGV[2])
if lost_steps then return lost_steps end
local MARKS_KEPT = 16
local ISSUED_MEANWHILE = 10000 -- bounds the loop if the number was overwritten
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
