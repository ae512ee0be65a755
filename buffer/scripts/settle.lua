-- fence, then ticket and verdict in turn: "ended", or the steps that trained it and survive ("-" for none, "3,5")
-- -> groups spent, groups ready again
local max_uses, spent, returned = get('max_uses', 1), 0, 0
for index = 2, #ARGV, 2 do
  local id, verdict = ARGV[index], ARGV[index + 1]
  local record = read(id)
  if record and record.state ~= 'kept' then
    local uses = #record.steps
    if verdict ~= 'ended' then record.steps = {} end
    for step in string.gmatch(verdict, '%d+') do record.steps[#record.steps + 1] = tonumber(step) end
    if verdict == 'ended' or #record.steps >= max_uses then
      spend(id, record)
      spent = spent + 1
    elseif record.state ~= 'reserved' and (record.state ~= 'ready' or #record.steps > 0) then
      leave(id, record)
      owe(uses - #record.steps)
      if record.state == 'taken' then
        record.taken = -1
        returned = returned + 1
      end
      enter(id, record, #record.steps == 0 and 'ready' or 'again', record.oldest)
    end
  end
end
return { spent, returned }
