-- Feeds bodies to the door's filter, whole and in pieces of every small size. Ends the load with an error where the answers differ.
local door
core.register_filter = function(_, class) door = class end
core.now = function() return { sec = 0 } end
dofile(os.getenv("HPLM_DOOR_LUA"))

local function refuses(body, size)
    local problem
    local one = setmetatable({ refuse = function(_, _, why) problem = problem or why end }, door)
    local message = { is_resp = function() return false end }
    one:http_headers({ get_var = function(_, name) return name == "txn.door" and "json" or nil end }, message)
    for at = 1, #body, size do
        message.body = function() return body:sub(at, at + size - 1) end
        one:http_payload({}, message)
    end
    return problem ~= nil
end

for body, expected in pairs({
    [ [[{"tenant":"acme","TEXT":"a\n\u0000\"\\"}]] ] = false,
    [ [[{"tenant":"acme\\u0000x\"\/\u0041\u00e9\u0100"}]] ] = false,
    [ [[{"TEXT":"\\\\\"\u0b1","tenant":"acme\u0000x"}]] ] = true,
    [ [[{"tenant":"\\\u001F"}]] ] = true,
    [ [[{"tenant":"\\\\\\\n"}]] ] = true,
    [ [[{"ten\nant":"acme"}]] ] = true,
}) do
    for size = 1, #body do
        if refuses(body, size) ~= expected then
            error(body .. " in pieces of " .. size .. " bytes")
        end
    end
end
