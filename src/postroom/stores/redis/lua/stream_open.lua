-- Make the group if it is not there.
begin()
return found_group()
