-- slurm-pfi for Slurm's job_submit/lua plugin: rewards jobs that let their power be lowered, and says at submission
-- what a job's flex means. docs/incentive.md explains it, and how it joins a job_submit.lua that you have already.
--
-- Install it as job_submit.lua beside slurm.conf, with JobSubmitPlugins=lua. It must never be in the way: a fault in it
-- is logged by slurmctld, and the job is taken as it is.

local pfi = {}

pfi.site = {
    -- As in slurm-pfi.toml, [policy]: keep the two the same.
    default_flex = "medium",
    none_partitions = {},
    none_accounts = {},
    none_qos = {},
    -- What becomes of "none" elsewhere. "low": the job is taken and its user told, as the controller reads it.
    -- "refuse": the job is refused.
    none_elsewhere = "low",

    -- The QOS for flexible jobs, made by sacctmgr with a UsageFactor below 1. "": there is none.
    qos = "flexible",
    -- The least loss, in percent, that a job has to allow for it.
    least_percent = 15,
    -- Whether a job that says nothing, and so has default_flex, goes there too.
    unasked = false,
    -- A job must ask for one of these: a cap does nothing to a job without a GPU.
    gres = { "gpu", "shard", "mps" },

    -- Who may move a job into that QOS afterwards whatever its flex: user ids. Root always.
    trusted_uids = {},
}

local CLASSES = { none = 0, low = 5, medium = 15, high = 30 }
local NEEDED = { "qos", "comment", "gres", "tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task" }

local function holds(list, name)
    for _, one in ipairs(list) do
        if name ~= nil and one:lower() == name:lower() then
            return true
        end
    end
    return false
end

local function split(text)
    local parts = {}
    for part in (text or ""):gmatch("[^,]+") do
        parts[#parts + 1] = part
    end
    return parts
end

-- ------------------------------------------------------------------------------------- what a job says of its flex

-- The greatest loss in percent of one value of --power-flex; nil if it is none. The same values as in the plugin, the
-- prolog and the controller: lower case, no blank, no sign, no leading zero.
function pfi.percent(word)
    if word == "auto" then
        word = pfi.site.default_flex
    end
    return CLASSES[word] or tonumber(word:match("^([1-9][0-9]?)%%$") or word:match("^(100)%%$"))
end

-- The first valid pfi:VALUE that stands alone in a comment, and the first word that begins so and is none.
function pfi.in_comment(comment)
    local found, wrong
    for word in (comment or ""):gmatch("[^ \t\n\r\f\v,;]+") do
        local mark, value = word:match("^([pP][fF][iI]:)(.*)$")
        if mark == "pfi:" and pfi.percent(value) then
            found = found or value
        elseif mark then
            wrong = wrong or (mark .. value:sub(1, 20)):gsub("[^A-Za-z0-9%%.:+_-]", "?")
        end
    end
    return found, wrong
end

-- The value of --power-flex as the plugin sends it; nil without. Slurm counts from 0. Several values that differ are
-- nobody's command: none of them counts.
local function flag_of(job)
    local env, found = job.spank_job_env, nil
    for i = 0, (env and job.spank_job_env_size or 0) - 1 do
        local value = env[i] and env[i]:match("^PFI_FLEX=(.*)$")
        if value and found and value ~= found then
            return "invalid"
        end
        found = value or found
    end
    return found
end

-- What the job asks: the word and where it stands. The flag beats the comment.
local function asked(flag, comment)
    if flag then
        return flag, "--power-flex=" .. flag
    end
    local found = pfi.in_comment(comment)
    return found, found and "pfi:" .. found .. " in the comment"
end

-- ------------------------------------------------------------------------------------------------------- the QOS

-- Slurm reads the count with strtoull: "00", "+0" and "0k" are none as well.
local function names_gpu(...)
    for _, text in ipairs({ ... }) do
        for _, one in ipairs(split(text)) do
            local name, rest = one:gsub("^gres[:/]", ""):match("^([^:=]+)(.*)$")
            if holds(pfi.site.gres, name) and not rest:match("[:=]%s*[+-]?0+%a*$") then
                return true
            end
        end
    end
    return false
end

-- Why a job that names these QOS may not have ours; nil if it may.
local function barred(word, has_gpu, named)
    local site = pfi.site
    local percent = word and pfi.percent(word)
    if word == nil and site.unasked then
        percent = pfi.percent("auto")
    end
    local need = string.format("QOS %s is for jobs that allow a loss of %g%% or more", site.qos, site.least_percent)
    if word and not percent then
        return need .. ", and this is no value of --power-flex"
    elseif not percent then
        return need .. ": ask with --power-flex=medium, for instance"
    elseif percent < site.least_percent then
        return string.format("%s, and this one allows %g%%", need, percent)
    elseif not has_gpu then
        return string.format("QOS %s is for jobs that ask for GPUs", site.qos)
    elseif #named > 1 then
        return string.format("QOS %s must stand alone", site.qos) -- else nobody could tell later which of them it has
    end
end

-- Whether every partition that the job may run in takes the QOS. A job is never moved to where Slurm would refuse it.
local function partitions_take(names, part_list)
    for _, name in ipairs(names) do
        local part = part_list[name]
        if not part or holds(split(part.deny_qos), pfi.site.qos) then
            return false
        end
        local allowed = part.allow_qos
        if allowed and allowed:upper() ~= "ALL" and not holds(split(allowed), pfi.site.qos) then
            return false
        end
    end
    return #names > 0
end

local function partitions_of(job, part_list)
    if job.partition then
        return split(job.partition)
    end
    for name, part in pairs(part_list) do
        if part.flag_default == 1 then
            return { name }
        end
    end
    return {}
end

local function may_say_none(job, partitions)
    local site = pfi.site
    if holds(site.none_accounts, job.account or job.default_account) then
        return true
    end
    if holds(site.none_qos, job.qos or job.default_qos) then
        return true
    end
    for _, name in ipairs(partitions) do
        if not holds(site.none_partitions, name) then
            return false
        end
    end
    return #partitions > 0
end

-- ----------------------------------------------------------------------------------------------- the two functions

local function tell(text)
    slurm.log_user("%s", "slurm-pfi: " .. text)
end

local function refuse(text)
    tell(text)
    return slurm.ESLURM_ACCESS_DENIED or slurm.ERROR
end

local function submit(job, part_list)
    local site = pfi.site
    local flag, partitions = flag_of(job), partitions_of(job, part_list)
    local word, where = asked(flag, job.comment)
    local _, wrong = pfi.in_comment(job.comment)
    if wrong then
        tell(wrong .. " in the comment is not a flex; " .. (where or "the site's default") .. " counts")
    end
    if word == "none" and not may_say_none(job, partitions) then
        if site.none_elsewhere == "refuse" then
            return refuse(where .. " is not allowed here; the least is low")
        end
        tell(where .. " is not allowed here; it is read as low")
    end

    if site.qos == "" then
        return slurm.SUCCESS
    end
    local wanted = split(job.qos)
    local has_gpu = names_gpu(job.tres_per_job or "", job.tres_per_node or "", job.tres_per_socket or "",
        job.tres_per_task or "")
    local why = barred(word, has_gpu, wanted)
    if holds(wanted, site.qos) then
        return why and refuse(why) or slurm.SUCCESS
    end
    if #wanted == 0 and why == nil and partitions_take(partitions, part_list) then
        job.qos = site.qos
        tell((where or "the site's default flex") .. ": the job goes to QOS " .. site.qos)
    end
    return slurm.SUCCESS
end

-- A job that is in the QOS, or is to come there, must go on deserving it. Its flag can not be changed, the rest can.
local function modify(change, job, uid)
    local touched = false
    for _, name in ipairs(NEEDED) do
        touched = touched or change[name] ~= nil
    end
    if not touched or pfi.site.qos == "" or uid == 0 then
        return slurm.SUCCESS -- such as each write of AdminComment, ours too
    end
    for _, trusted in ipairs(pfi.site.trusted_uids) do
        if uid == trusted then
            return slurm.SUCCESS
        end
    end
    local qos = split(change.qos or job.qos)
    if not holds(qos, pfi.site.qos) then
        return slurm.SUCCESS
    end
    local function after(name)
        return change[name] or job[name] or ""
    end
    local word = asked(flag_of(job), after("comment"))
    local has_gpu = names_gpu(after("tres_per_job"), after("tres_per_node"), after("tres_per_socket"),
        after("tres_per_task"))
    local why = barred(word, has_gpu, qos)
    return why and refuse(why) or slurm.SUCCESS
end

-- Since Slurm 26.05 an error in Lua refuses the job; before, it let it pass. Ours always lets it pass.
local function guarded(name, rule, ...)
    local done, answer = pcall(rule, ...)
    if done then
        return answer
    end
    pcall(slurm.log_error, "%s", "slurm-pfi: " .. name .. ": " .. tostring(answer) .. "; the job is taken as it is")
    return slurm.SUCCESS
end

-- For a job_submit.lua of your own: both return slurm.SUCCESS or the error to return.
function pfi.submit(job_desc, part_list, submit_uid)
    return guarded("slurm_job_submit", submit, job_desc, part_list, submit_uid)
end

function pfi.modify(job_desc, job_rec, part_list, modify_uid)
    return guarded("slurm_job_modify", modify, job_desc, job_rec, modify_uid)
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    return pfi.submit(job_desc, part_list, submit_uid)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return pfi.modify(job_desc, job_rec, part_list, modify_uid)
end

return pfi
