-- quarantined groups... -> reports deleted
even_when_full()
local forgotten = 0
for _, id in ipairs(ARGV) do forgotten = forgotten + forget_report(id) end
return forgotten
