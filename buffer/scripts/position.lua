-- fence, step -> highest version, next ticket, next task, changes of the mix as "AT ID JSON"
local lost_steps = step_lost(ARGV[2])
if lost_steps then return lost_steps end
return { get('highest', -1), get('next_ticket', 0), get('next_task', 0), call('LRANGE', MIX, 0, -1) }
